"""Compares weights at the first reduction, where all ranks are anyway."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Collection, Sequence
from typing import Any

from keras_hvd.backends import equal_start
from keras_hvd.backends.equal_start import warn_of_difference as warn_of_difference
from keras_hvd.backends.gradient_reduction import KIND, GradientReduction
from keras_hvd.backends.torch.variables import bytes_of
from keras_hvd.backends.variables import identity
from keras_hvd.job import basics
from keras_hvd.job.process_sets import number_of
from keras_hvd.recording import recorder

# The jobs and process sets in which weights were compared.
_compared: set[tuple[basics.Epoch, int]] = set()


def digest(variables: Sequence[Any]) -> int:
    """A checksum of the first elements of variables, of 20 bits.

    >>> import keras
    >>> one, two = keras.Variable(1.0), keras.Variable(2.0)
    >>> digest([one]) == digest([one]), digest([one]) == digest([two])
    (True, False)
    """
    values = (getattr(each, "value", each) for each in variables)
    first = (each.reshape(-1)[: equal_start.ELEMENTS] for each in values)
    return equal_start.checksum(map(bytes_of, first))


def compare(
    variables: Sequence[Any],
    reduction: GradientReduction,
    local: Collection[int] = (),
) -> None:
    """Compares the variables of a job's first reduction between its ranks.

    `local` has the `identity` of variables that may differ. Raises RuntimeError if
    Keras runs on another backend on other ranks.
    """
    key = basics.epoch(), number_of(reduction.process_set, KIND)
    if key in _compared or recorder.scaling():
        return
    own = digest([each for each in variables if identity(each) not in local])
    equal_start.compare(own, reduction.process_set, equal_start.broadcasts())
    _compared.add(key)
    _tell_at_the_end()


@functools.cache
def _tell_at_the_end() -> None:
    atexit.register(_at_exit)


def _at_exit() -> None:
    if not hasattr(sys, "last_value"):
        warn_of_difference()
