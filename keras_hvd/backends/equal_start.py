"""What ranks must begin to train with alike: Keras' backend, and the weights.

Reducing gradients leaves weights as different as they were. So a digest of the weights
is compared at the first reduction. Scripts may broadcast the weights after the first
step, as Horovod's examples do. So a difference is reported only later. Backends name
and order their collectives differently, so those are compared before anything waits.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable

import keras
import numpy as np

from keras_hvd.backends.dense_collectives import DenseTensor, Together
from keras_hvd.backends.gradient_reduction import KIND
from keras_hvd.backends.reduce_op import Sum
from keras_hvd.exceptions import KerasHvdError
from keras_hvd.job import basics, log
from keras_hvd.job.process_sets import ProcessSet, number_of
from keras_hvd.recording import recorder

# Of each variable: enough elements to tell random weights apart.
ELEMENTS = 1024

_broadcasts = 0

# The broadcasts before each comparison that has found a difference.
_differences: list[int] = []

# By job and process set: whether Keras' backends differ.
_backends_differ: dict[tuple[basics.Epoch, int], bool] = {}


def broadcasts() -> int:
    """Returns the number of broadcasts that this process has run, or traced."""
    return _broadcasts


def note_broadcast() -> None:
    """Counts a broadcast."""
    global _broadcasts
    _broadcasts += 1


def checksum(parts: Iterable[bytes | memoryview]) -> int:
    """A checksum of 20 bits.

    >>> checksum([b"weights"]) == checksum([b"we", b"ights"])
    True
    """
    found = 0
    for each in parts:
        found = zlib.crc32(each, found)
    return found & 0xFFFFF


def require_same_backend(process_set: ProcessSet) -> None:
    """Raises RuntimeError if ranks run Keras on different backends; asks once a job.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> require_same_backend(keras_hvd.global_process_set)
    """
    key = _key(process_set)
    is_alone = process_set.size() == 1 or not process_set.included()
    if is_alone or recorder.scaling():
        return
    if key not in _backends_differ:
        # After a failure, what the caller does next raises an error of its own.
        with contextlib.suppress(KerasHvdError):
            [differs] = differ("keras_hvd/backend", [_backend()], process_set)
            _backends_differ[key] = differs
    _raise_if_different(key)


def compare(own: int, process_set: ProcessSet, broadcasts_before: int) -> None:
    """Compares the ranks' backends and digests of weights, of which `own` is one.

    Raises RuntimeError if backends differ. `warn_of_difference` tells of weights, if
    there are no broadcasts besides `broadcasts_before`.
    """
    key, name = _key(process_set), "keras_hvd/weights at the start"
    # Another try gets the same error.
    _raise_if_different(key)
    _backends_differ[key], weights = differ(name, [_backend(), own], process_set)
    _raise_if_different(key)
    if weights and process_set.rank() == 0:
        _differences.append(broadcasts_before)


def differ(name: str, values: list[int], process_set: ProcessSet) -> list[bool]:
    """Whether each of these numbers of 20 bits differs between the ranks.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> differ("versions", [3], keras_hvd.global_process_set)
    [False]
    """
    # Ranks whose data has ended give zeros. Among the others, the square of the sum
    # is the sum of squares times their number only if all numbers are equal.
    numbers = np.array([1, *values, *(each**2 for each in values)], np.int64)
    with Together() as collectives:
        collectives.allreduce(
            name, [DenseTensor.of_array(numbers)], Sum, number_of(process_set, name)
        )
    count, *sums = map(int, numbers)
    pairs = zip(sums[: len(values)], sums[len(values) :], strict=True)
    return [count * squares != total**2 for total, squares in pairs]


def warn_of_difference() -> None:
    """Warns, on rank 0, if weights differed and nothing was broadcast since then."""
    while _differences:
        if _differences.pop() == _broadcasts:
            log.warn(
                "the ranks have begun to train with different weights, which reducing "
                "gradients leaves different: each rank trains a model of its own. Give "
                "all ranks the weights of one, before the first step: pass callbacks="
                "[keras_hvd.callbacks.BroadcastGlobalVariables(0)] to fit(), or call "
                "keras_hvd.broadcast_variables(model.variables, root_rank=0)",
                stacklevel=2,
            )


def _key(process_set: ProcessSet) -> tuple[basics.Epoch, int]:
    return basics.epoch(), number_of(process_set, KIND)


def _backend() -> int:
    return checksum([keras.backend.backend().encode()])


def _raise_if_different(key: tuple[basics.Epoch, int]) -> None:
    if _backends_differ.get(key):
        raise RuntimeError(
            f"Keras runs on {keras.backend.backend()} on rank {basics.rank()}, and on "
            "another backend on other ranks: set the environment variable "
            "KERAS_BACKEND to the same on all ranks"
        )
