"""Compares weights at the first reduction, beside the training: no rank waits."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_hvd.backends import equal_start
from keras_hvd.backends.gradient_reduction import KIND, GradientReduction
from keras_hvd.backends.tensorflow.variables import has_value
from keras_hvd.backends.variables import identity, path
from keras_hvd.exceptions import KerasHvdError
from keras_hvd.job import arrival, basics, log
from keras_hvd.job.process_sets import ProcessSet, number_of
from keras_hvd.recording import recorder

# At the end, a comparison that another rank has not joined is given up.
_PATIENCE_SECONDS = 2
# The end of a process set would then fail, on all ranks.
_PATIENCE_OF_SET_SECONDS = 30

# The jobs and process sets in which weights were compared.
_compared: set[tuple[basics.Epoch, int]] = set()
_comparisons: list[_Comparison] = []

# A later job of this process, and the variables that its ranks have got the same of.
_given: tuple[basics.Epoch | None, set[int]] = (None, set())


def digest(variables: Sequence[Any]) -> int:
    """A checksum of the first elements of variables, of 20 bits.

    >>> one, two = tf.Variable(1.0), tf.Variable(2.0)
    >>> digest([one]) == digest([one]), digest([one]) == digest([two])
    (True, False)
    """
    values = (
        each.value if isinstance(each, keras.Variable) else each for each in variables
    )
    first = (
        tf.reshape(tf.convert_to_tensor(value), [-1])[: equal_start.ELEMENTS]
        for value in values
    )
    return equal_start.checksum(np.ascontiguousarray(each).tobytes() for each in first)


def compare(
    variables: Sequence[Any], reduction: GradientReduction, local: Collection[int] = ()
) -> None:
    """Compares the variables of a job's first reduction between its ranks.

    `local` has the `identity` of variables that may differ. The values are those before
    the step whose graph is being traced.
    """
    process_set = reduction.process_set
    key = basics.epoch(), number_of(process_set, KIND)
    if key in _compared or recorder.scaling() or arrival.is_awaited():
        return
    shared = [each for each in variables if identity(each) not in local]
    job, given = _given
    if job == key[0]:
        _compared.add(key)
        _warn_of_those_not_given([x for x in shared if identity(x) not in given])
        return
    with tf.init_scope():
        # A function that creates variables is traced again once they have values. In
        # a graph for sessions they have none while it is made.
        if not (tf.executing_eagerly() and all(map(has_value, shared))):
            return
        _compared.add(key)
        _comparisons.append(_Comparison(digest(shared), process_set))
    _tell_at_the_end()


def note_given(variables: Sequence[Any]) -> None:
    """Notes that all ranks of this job have got the same values of these variables.

    In a job that ranks come to from another one, this takes the place of a comparison:
    steps that were traced before make none, and leave ranks that are new alone with it.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> note_given([tf.Variable(1.0)])
    """
    global _given
    job, given = _given
    if basics.epoch().number > 1:
        here = given if job == basics.epoch() else set()
        _given = basics.epoch(), {*here, *map(identity, variables)}


def _warn_of_those_not_given(variables: Sequence[Any]) -> None:
    if variables:
        log.warn(
            f"{len(variables)} variables are trained that the state of elastic.run "
            f"does not have, such as {path(variables[0])!r}: a rank that joins later "
            "has values of its own. Make the state with the model, as in "
            "keras_hvd.elastic.KerasState(model)",
            stacklevel=2,
            from_any_rank=True,
        )


def warn_of_difference() -> None:
    """Warns, on rank 0, if weights differed and nothing was broadcast since then."""
    for each in [*_comparisons]:
        if not each.result.is_alive():
            _comparisons.remove(each)
    equal_start.warn_of_difference()


class _Comparison:
    """A digest that is being compared with those of the other ranks."""

    def __init__(self, own: int, process_set: ProcessSet):
        self.number = process_set.process_set_id
        given = own, process_set, equal_start.broadcasts()
        self.result = threading.Thread(target=_compare, args=given, daemon=True)
        self.result.start()


def _compare(own: int, process_set: ProcessSet, broadcasts_before: int) -> None:
    try:
        equal_start.compare(own, process_set, broadcasts_before)
    except KerasHvdError:
        # The job has ended before.
        return
    except RuntimeError as error:
        # The step waits for ranks that end with it.
        log.write("error", str(error))


@functools.cache
def _tell_at_the_end() -> None:
    basics.before_an_end(_tell)
    atexit.register(_at_exit)


def _at_exit() -> None:
    if not hasattr(sys, "last_value"):
        _tell()


def _tell(process_set: int | None = None) -> None:
    """Waits for comparisons, in all process sets or in one that is about to end.

    Without this rank those of the others would fail, and an end of the set with them.
    """
    ending = [each for each in _comparisons if process_set in (None, each.number)]
    patience = _PATIENCE_SECONDS if process_set is None else _PATIENCE_OF_SET_SECONDS
    for each in ending:
        each.result.join(patience)
    warn_of_difference()
    for each in ending:
        if each in _comparisons:
            _comparisons.remove(each)
