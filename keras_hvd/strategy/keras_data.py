"""Keras' data under a strategy: each rank takes its rows of the same batches.

Ranks agree on the number of batches and on shuffling. After each epoch's first step
they compare their first batches.
"""

from __future__ import annotations

import contextlib
import functools
import random
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as trainer_module
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from tensorflow.python.eager import context

from keras_hvd.backends.tensorflow import current_strategy
from keras_hvd.job import log
from keras_hvd.job.objects import allgather_object, broadcast_object
from keras_hvd.job.temporary import temporarily
from keras_hvd.strategy import keras_patches
from keras_hvd.strategy.distributed_dataset import (
    DistributedDataset,
    distribute_for_steps,
    parts_for_steps,
)


def rows_of_rank(
    data: Any, same: str, strategy: Any, method: str
) -> tuple[Any, bool | None]:
    """This rank's rows of nested arrays that all ranks have, by argument.

    A rank without rows gets the first row. The second result says whether this rank has
    rows; it is None if all have some.

    Ranks compare the beginning of each array of argument `same`. Raises ValueError if
    something has no rows, or differs between ranks.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> data = {"x": np.arange(3), "y": None}
    >>> rows_of_rank(data, "x", keras_hvd.Strategy(), "train_on_batch")
    ({'x': array([0, 1, 2]), 'y': None}, None)
    """
    leaves = [each for each in keras.tree.flatten(data) if each is not None]
    for each in leaves:
        if not getattr(each, "shape", ()):
            raise ValueError(
                f"{method} under a keras_hvd.Strategy takes arrays, of which each rank "
                f"takes its rows; got {type(each).__name__}"
            )
    rows = [int(each.shape[0]) for each in leaves]
    same_leaves = [each for each in keras.tree.flatten(data[same]) if each is not None]
    described = {"rows": rows, f"checksum of {same}": [*map(_checksum, same_leaves)]}
    require_same(method, described, strategy)
    process_set = strategy.extended.process_set
    rank, size = process_set.rank(), process_set.size()
    has_rows = rank < rows[0]

    def rows_of(each):
        if each is None:
            return None
        share, rest = divmod(int(each.shape[0]), size)
        begin = rank * share + min(rank, rest)
        return each[begin : begin + share + (rank < rest)] if has_rows else each[:1]

    own = keras.tree.map_structure(rows_of, data)
    return own, None if rows[0] >= size else has_rows


class StrategyEpochIterator(trainer_module.TFEpochIterator):
    """The iterator of `fit`, `evaluate` and `predict` under a strategy."""

    def __init__(self, distribute_strategy: Any, **arguments: Any):
        given = arguments["x"]
        if isinstance(given, DistributedDataset):
            given.require_same_job()
            if given.whole is not None:
                arguments["x"] = given.whole
        is_distributed = isinstance(arguments["x"], DistributedDataset)
        if is_distributed and arguments.get("class_weight") is not None:
            raise ValueError(
                "fit takes no class_weight with a dataset of "
                "distribute_datasets_from_function: let its elements be "
                "(x, y, sample_weight)"
            )
        EpochIterator.__init__(self, **arguments)
        self._distribute_strategy = distribute_strategy
        self._several = current_strategy.several_ranks(distribute_strategy)
        # The dataset's functions refer to these, not to this object: a reference cycle
        # would keep it until garbage collection, and TensorFlow takes up to a minute to
        # free an iterator that was kept for long.
        self._digests: dict[str, int] = {}
        self._order = _Order()
        adapter = self.data_adapter
        self._shuffles = bool(
            arguments.get("shuffle")
            and isinstance(adapter, (ArrayDataAdapter, PyDatasetAdapter))
        )
        with self._agreed_shuffle():
            dataset = adapter.get_tf_dataset()
        self.element_spec = dataset.element_spec
        if is_distributed:
            # Its parts may be different data by intention.
            self._several = None
            dataset = parts_for_steps(dataset)
        else:
            if _has_optionals(dataset):
                dataset = dataset.enumerate().map(_without_optionals)
            if self._several is None:
                dataset = distribute_strategy.experimental_distribute_dataset(dataset)
            else:
                dataset = distribute_for_steps(
                    self._noting_first(dataset),
                    distribute_strategy.extended.process_set,
                    self._every_rank_has_rows(),
                )
        self._distributed_dataset = dataset

    def _every_rank_has_rows(self) -> bool:
        """Whether all batches are known to have as many rows as there are ranks."""
        adapter = self.data_adapter
        if not isinstance(adapter, ArrayDataAdapter):
            return False
        ranks = self._distribute_strategy.num_replicas_in_sync
        batch, last = adapter.batch_size, adapter.partial_batch_size
        return batch >= ranks and (not last or last >= ranks)

    def _agreed_shuffle(self) -> contextlib.AbstractContextManager:
        """Compares the ranks' data, and makes ranks shuffle arrays alike."""
        if self._several is None:
            return contextlib.nullcontext()
        adapter = self.data_adapter
        seed = context.global_seed()
        drawn = random.SystemRandom().getrandbits(63)
        of_ranks = require_same(
            "fit, evaluate and predict",
            {
                "kind of data": type(adapter).__name__.removesuffix("Adapter"),
                "samples": getattr(adapter, "_num_samples", None),
                "batches": adapter.num_batches,
                "batch_size": getattr(adapter, "_batch_size", None),
                "steps_per_epoch": self.steps_per_epoch,
                "steps_per_execution": self.steps_per_execution,
                "shuffle": self._shuffles,
            },
            self._several,
            also=(seed, drawn),
        )
        seed, self._order.seed = of_ranks[0]
        if not isinstance(adapter, ArrayDataAdapter) or not self._shuffles:
            return contextlib.nullcontext()
        if seed is None:
            return _shuffled_by(self._order.permutation)
        return _global_seed(seed)

    def _noting_first(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The dataset; each pass records checksums of its first batch."""
        noted = self._digests

        def look(number, *batch):
            named = [
                (_name_in_batch(part, each), each)
                for part, data in zip(("x", "y"), batch)
                for each in tf.nest.flatten(data)
                if _is_comparable(each)
            ]
            # `note` refers only to names: tensors would keep the dataset's functions.
            names, flat = [name for name, _ in named], [each for _, each in named]

            def note(*arrays):
                digests: dict[str, int] = {}
                for name, array in zip(names, arrays):
                    # Before Python 3.12 no type says that an array is a buffer.
                    rows: Any = np.ascontiguousarray(array)
                    digests[name] = zlib.crc32(rows, digests.get(name, 0))
                noted.clear()
                noted.update(digests)
                return np.int32(0)

            if flat:
                digest = functools.partial(tf.numpy_function, note, flat, tf.int32)
                tf.cond(tf.equal(number, 0), digest, lambda: tf.constant(0))

        def noting(number, batch):
            # A tuple has x, y and weights; anything else is x.
            look(number, *(batch if isinstance(batch, tuple) else [batch]))
            return batch

        return dataset.enumerate().map(noting)

    def _get_iterator(self):
        self._order.passes += 1
        return super()._get_iterator()

    @contextlib.contextmanager
    def catch_stop_iteration(self):
        with super().catch_stop_iteration():
            yield
        # If data ended early, the suspended generator refers to this object.
        self._epoch_iterator = None

    def _enumerate_iterator(self):
        if self._several is not None and self._shuffles:
            self._agree_on_python_random()
        first = self._several is not None
        for step in super()._enumerate_iterator():
            yield step
            if first:
                self._compare_first()
                first = False

    def _agree_on_python_random(self):
        """Agrees on Python's own generator, with which Keras shuffles a PyDataset."""
        if isinstance(self.data_adapter, PyDatasetAdapter):
            ranks, state = self._several.extended.process_set, random.getstate()
            state = broadcast_object(
                state, ranks.ranks[0], name="Strategy/random", process_set=ranks
            )
            random.setstate(state)

    def _compare_first(self):
        process_set = self._several.extended.process_set
        of_ranks = allgather_object(
            self._digests, name="Strategy/first_batch", process_set=process_set
        )
        strict = isinstance(self.data_adapter, ArrayDataAdapter)
        for rank, digests in zip(process_set.ranks, of_ranks, strict=True):
            differing = [
                part for part in of_ranks[0] if digests.get(part) != of_ranks[0][part]
            ]
            if not differing:
                continue
            root = process_set.ranks[0]
            what = (
                f"the first batch of rank {rank} is not that of rank {root}: they "
                f"differ in {' and '.join(differing)}. Under a keras_hvd.Strategy "
                "every rank reads all batches and takes its rows of each: give all "
                "ranks the same data, not a part (keras_hvd.data.part, .shard), in the "
                "same order, shuffled by the same seed (keras.utils.set_random_seed; "
                "seed= of dataset.shuffle and of functions like "
                "keras.utils.timeseries_dataset_from_array)"
            )
            if strict or "y (labels)" in differing:
                raise RuntimeError(what)
            if process_set.rank() == 0:
                # Random augmentation may differ.
                log.warn(what, stacklevel=2, from_any_rank=True)
            return


class _Order:
    """A new order in each pass over the data, the same on all ranks."""

    def __init__(self) -> None:
        self.seed = 0
        self.passes = 0

    def permutation(self, values: np.ndarray) -> np.ndarray:
        first = int(values[0]) if len(values) else 0
        seed = [self.seed, self.passes, first]
        return np.random.default_rng(seed).permutation(values)


@keras_patches.replaces(trainer_module, "TFEpochIterator")
def _epoch_iterator(plain, distribute_strategy=None, **arguments):
    if not current_strategy.is_ours(distribute_strategy):
        return plain(distribute_strategy=distribute_strategy, **arguments)
    return StrategyEpochIterator(distribute_strategy, **arguments)


@keras_patches.replaces(data_adapters, "is_tf_dataset")
def _is_tf_dataset(plain, data):
    # Keras knows distributed datasets by the names of TensorFlow's own classes.
    return isinstance(data, DistributedDataset) or plain(data)


def _checksum(array: Any) -> int:
    values = np.asarray(array).reshape(-1)[:16_384]
    if values.dtype.hasobject:
        return zlib.crc32(repr(values.tolist()).encode())
    return zlib.crc32(values.tobytes())


def _has_optionals(dataset: tf.data.Dataset) -> bool:
    """Whether a generator gave None, which Keras replaces by an empty optional."""
    specs = tf.nest.flatten(dataset.element_spec)
    return any(isinstance(each, tf.OptionalSpec) for each in specs)


def _without_optionals(_: tf.Tensor, batch: Any) -> Any:
    # After a number, because tf.data would unpack a tuple that is the only argument.
    return tf.nest.map_structure(
        lambda each: None if isinstance(each, tf.experimental.Optional) else each, batch
    )


def _is_comparable(value: Any) -> bool:
    others = tf.string, tf.resource, tf.variant
    return isinstance(value, tf.Tensor) and value.dtype not in others


def _name_in_batch(part: str, tensor: tf.Tensor) -> str:
    # Images may be augmented differently on each rank, labels not.
    is_label = part == "y" and tensor.shape.rank in (0, 1, 2)
    return f"{part} (labels)" if is_label else part


_SAME_DATA = (
    "Give every rank all of the same data: each takes its rows of each batch by itself."
)


def require_same(
    method: str,
    described: dict[str, Any],
    strategy: Any,
    also: Any = None,
    remedy: str = _SAME_DATA,
) -> list[Any]:
    """Raises ValueError, on every rank, if ranks differ in `described`.

    The message begins with `method` and ends with `remedy`. Returns each rank's `also`.
    """
    process_set = strategy.extended.process_set
    of_ranks = allgather_object(
        (described, also), name="Strategy/data", process_set=process_set
    )
    first = of_ranks[0][0]
    for rank, (other, _) in zip(process_set.ranks, of_ranks, strict=True):
        differing = [each for each in first if first[each] != other.get(each)]
        if not differing:
            continue
        here, there = (
            ", ".join(f"{each}={values.get(each)}" for each in differing)
            for values in (first, other)
        )
        raise ValueError(
            f"{method} under a keras_hvd.Strategy: rank {process_set.ranks[0]} was "
            f"given {here}, and rank {rank} {there}. {remedy}"
        )
    return [each for _, each in of_ranks]


@contextlib.contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Gives ops created in this block a global seed."""
    if context.global_seed() == seed:
        yield
        return
    eager = context.context()
    before = eager._seed, eager._rng
    eager._set_global_seed(seed)
    try:
        yield
    finally:
        eager._seed, eager._rng = before


def _shuffled_by(order: Any) -> contextlib.AbstractContextManager[None]:
    """Makes `tf.random.shuffle`, with which Keras shuffles arrays, use this order."""

    def shuffle(value, seed=None, name=None):
        shuffled = tf.numpy_function(order, [value], value.dtype)
        return tf.ensure_shape(shuffled, value.shape)

    return temporarily(tf.random, "shuffle", shuffle)
