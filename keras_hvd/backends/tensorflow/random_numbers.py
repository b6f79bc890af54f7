"""Random numbers that differ between ranks, in layers and steps that users write.

Scripts give all ranks one seed. Keras' own layers have generators of their own, which
continue with the rank. Draws of `tf.random` and `keras.random` without a generator use
a global seed instead. Within a step, it is that of rank 0 plus the rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.random import seed_generator
from tensorflow.python.eager import context

from keras_hvd.backends.tensorflow.collectives.submission import is_compiled
from keras_hvd.job import basics, later_jobs, log
from keras_hvd.job.temporary import temporarily

# Set on a generator of Keras that continues with this rank's seed.
_HAS_RANK = "_keras_hvd_has_rank"

# Ops that XLA compiles. It gives none of them a seed.
_DRAWING_OPS = {
    "Multinomial",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}


class _OfRank(int):
    """A graph's seed. TensorFlow takes its remainder to seed an op that draws."""

    def __mod__(self, other: int) -> int:
        later_jobs.note_held("rank")
        return int(self) % other


@contextlib.contextmanager
def of_rank(rank: int) -> Iterator[None]:
    """Seeds the random ops that are drawn or traced in this block by rank.

    Example:

    >>> def draw(rank):
    ...     tf.random.set_seed(42)
    ...     with of_rank(rank):
    ...         return tf.random.uniform([]).numpy().item()
    >>> draw(0) == draw(0), draw(0) == draw(1)
    (True, False)
    """
    if tf.executing_eagerly():
        with _eagerly(rank):
            yield
        return
    graph = tf.compat.v1.get_default_graph()
    first = len(graph.get_operations())
    seed = None if graph.seed is None else _OfRank(graph.seed + rank)
    with temporarily(graph, "seed", seed):
        yield
    if rank == 0 and is_compiled():
        _warn_of_unseeded(graph.get_operations()[first:])


def _eagerly(rank: int) -> contextlib.AbstractContextManager[None]:
    eager = context.context()
    if eager._seed is None or rank == 0:
        return contextlib.nullcontext()
    # TensorFlow draws an op's seed from a generator of its own: ranks stay in step.
    return temporarily(eager, "_seed", eager._seed + rank)


def _warn_of_unseeded(operations: list[tf.Operation]) -> None:
    names = [each.name for each in operations if each.type in _DRAWING_OPS]
    if names:
        _warn_once(", ".join(names))


@functools.cache
def _warn_once(names: str) -> None:
    log.warn(
        f"{names}: TensorFlow's random numbers have no seed in what XLA compiles, and "
        "are the same on all ranks. Draw them with keras.random instead, or pass "
        "jit_compile=False",
        stacklevel=2,
    )


@functools.cache
def install(is_distributed: Callable[[Any], bool]) -> None:
    """Makes the steps of models whose optimizer is distributed draw a rank's numbers.

    Also applies to a user's own step, which may reduce by itself.

    Example:

    >>> from keras_hvd.optimizer.distributed_class import is_distributed
    >>> install(is_distributed)
    """
    plain = keras.Model._make_function

    def may_reduce(model):
        has_own_step = type(model).train_step is not keras.Model.train_step
        return has_own_step or is_distributed(model.optimizer)

    @functools.wraps(plain)
    def make_function(model, step_function):
        @functools.wraps(step_function)
        def step(data):
            # A strategy does it for all steps that its replicas run.
            is_replica = tf.distribute.has_strategy()
            is_alone = basics.size() == 1 and not later_jobs.are_possible()
            if is_replica or is_alone or not may_reduce(model):
                return step_function(data)
            with of_rank(basics.rank()):
                return step_function(data)

        return plain(model, step)

    keras.Model._make_function = make_function


def continue_with_rank(generator: Any, seed: Any, rank: int) -> None:
    """Makes a generator continue with the ranks' seed, or state, plus this rank.

    The generator is Keras', or a `tf.random.Generator`, whose state ends with its key.

    Example:

    >>> generator = keras.random.SeedGenerator(7)
    >>> continue_with_rank(generator, generator.state, rank=2)
    >>> generator.state.numpy().tolist()
    [9, 0]
    """
    state = generator.state
    places = state.shape[0]
    place = places - 1 if isinstance(generator, tf.random.Generator) else 0
    added = tf.one_hot(place, places, on_value=rank, off_value=0)
    state.assign(seed + tf.cast(added, state.dtype))
    vars(generator)[_HAS_RANK] = True


def continue_global_generator(rank: int) -> None:
    """Makes Keras' global generator continue with the rank, unless it does already.

    Example:

    >>> continue_global_generator(rank=0)
    """
    generator = get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    if generator is not None and _HAS_RANK not in vars(generator):
        with tf.init_scope():
            continue_with_rank(generator, generator.state, rank)
