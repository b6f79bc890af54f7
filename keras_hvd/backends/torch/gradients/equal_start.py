"""Warns once if the ranks have begun to train with different weights.

Reducing gradients leaves weights as different as they were. So a digest of the weights
is compared at the first reduction, where all ranks are anyway. Scripts may broadcast
the weights after the first step, as Horovod's examples do. So a difference is reported
only later.
"""

from __future__ import annotations

import atexit
import functools
import sys
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from keras_hvd.backends.gradient_reduction import KIND, GradientReduction
from keras_hvd.backends.host_collectives import HostTensor, Together
from keras_hvd.backends.reduce_op import Sum
from keras_hvd.backends.torch.collectives import reductions
from keras_hvd.backends.torch.variables import bytes_of
from keras_hvd.backends.variables import identity
from keras_hvd.job import basics, log
from keras_hvd.job.process_sets import number_of
from keras_hvd.recording import recorder

# Of each variable: enough elements to tell random weights apart.
_ELEMENTS = 1024

# The jobs and process sets in which weights were compared.
_compared: set[tuple[basics.Epoch, int]] = set()

# The broadcasts before each comparison that has found a difference.
_differences: list[int] = []


def digest(variables: Sequence[Any]) -> int:
    """A checksum of the first elements of variables, of 20 bits.

    >>> import keras
    >>> one, two = keras.Variable(1.0), keras.Variable(2.0)
    >>> digest([one]) == digest([one]), digest([one]) == digest([two])
    (True, False)
    """
    checksum = 0
    for each in variables:
        value = getattr(each, "value", each)
        checksum = zlib.crc32(bytes_of(value.reshape(-1)[:_ELEMENTS]), checksum)
    return checksum & 0xFFFFF


def compare(
    variables: Sequence[Any],
    reduction: GradientReduction,
    local: Collection[int] = (),
) -> None:
    """Compares the variables of a job's first reduction between its ranks.

    `local` has the `identity` of variables that may differ.
    """
    process_set = reduction.process_set
    key = basics.epoch(), number_of(process_set, KIND)
    if key in _compared or recorder.scaling():
        return
    _compared.add(key)
    own = digest([each for each in variables if identity(each) not in local])
    # Ranks whose data has ended give zeros. Among the others, the square of the sum
    # is the sum of squares times their number only if all numbers are equal.
    numbers = np.array([1, own, own**2], np.int64)
    with Together() as collectives:
        collectives.allreduce(
            "keras_hvd/weights at the start",
            [HostTensor.of_array(numbers)],
            Sum,
            key[1],
        )
    count, total, squares = map(int, numbers)
    if count * squares != total**2 and process_set.rank() == 0:
        _differences.append(reductions.broadcasts())
        _tell_at_the_end()


def warn_of_difference() -> None:
    """Warns, on rank 0, if weights differed and nothing was broadcast since then."""
    while _differences:
        if _differences.pop() == reductions.broadcasts():
            log.warn(
                "the ranks have begun to train with different weights, which reducing "
                "gradients leaves different: each rank trains a model of its own. Give "
                "all ranks the weights of one, before the first step: pass callbacks="
                "[keras_hvd.callbacks.BroadcastGlobalVariables(0)] to fit(), or call "
                "keras_hvd.broadcast_variables(model.variables, root_rank=0)",
                stacklevel=2,
            )


@functools.cache
def _tell_at_the_end() -> None:
    atexit.register(_at_exit)


def _at_exit() -> None:
    if not hasattr(sys, "last_value"):
        warn_of_difference()
