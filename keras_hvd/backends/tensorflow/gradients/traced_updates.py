"""Makes a traced update fail once its optimizer reduces gradients in another way.

Functions that Keras traces for a model are traced again (`traced_steps`). A
`tf.function` of the user's own may be traced while its optimizer is plain. It would
then train each rank for itself without an error.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_hvd.backends.tensorflow import freed_iterators
from keras_hvd.backends.tensorflow.collectives import submission
from keras_hvd.job import basics, native

# An attribute of optimizers that have been traced, which Keras must not track.
_NUMBER = "_keras_hvd_number"

_numbers = itertools.count(1)
# By the optimizer's number: how often it has changed.
_changes: collections.Counter[int] = collections.Counter()


@functools.cache
def install() -> None:
    """Makes every update traced in a job depend on its optimizer's way of reducing.

    Example:

    >>> install()
    """
    freed_iterators.install()
    plain = keras.optimizers.Optimizer.apply

    def apply(self, grads, trainable_variables=None):
        with _only_unchanged(self):
            return plain(self, grads, trainable_variables)

    # With `__wrapped__`, AutoGraph would convert Keras' code.
    functools.update_wrapper(apply, plain, updated=())
    del vars(apply)["__wrapped__"]
    keras.optimizers.Optimizer.apply = apply


def note_change(optimizer: Any) -> None:
    """Makes functions that were traced with an optimizer until now fail from now on.

    Example:

    >>> note_change(keras.optimizers.SGD())
    """
    number = vars(optimizer).get(_NUMBER)
    if number is not None:
        _changes[number] += 1
        with tf.init_scope():
            native.ops().keras_hvd_note_change(optimizer=number)


def left_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function: a trace holds its collectives.

    >>> left_out(len) is len
    True
    """
    return function


def _only_unchanged(optimizer: Any) -> contextlib.AbstractContextManager:
    if tf.executing_eagerly() or not basics.is_initialized():
        return contextlib.nullcontext()
    # A strategy reduces itself, and its optimizers are not distributed.
    if tf.distribute.has_strategy():
        return contextlib.nullcontext()
    number = vars(optimizer).get(_NUMBER) or next(_numbers)
    vars(optimizer)[_NUMBER] = number
    check = native.ops().keras_hvd_require_unchanged(
        optimizer=number,
        changes=_changes[number],
        title=f"optimizer {optimizer.name!r}",
        name="keras_hvd_unchanged",
    )
    submission.run_operation_independently(check)
    return tf.control_dependencies([check])
