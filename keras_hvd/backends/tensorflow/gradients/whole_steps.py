"""A step is made whole or not at all: nothing changes before all gradients are reduced.

If a rank dies while gradients are reduced, some buckets arrive and others do not. So
weights, slots and the optimizer's counts wait for all of them.

On a GPU they do not: its stream goes on after a failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_hvd.backends.tensorflow.collectives import gradients, submission
from keras_hvd.job import native


class WholeStep(contextlib.ExitStack):
    """A context for the update of variables, in which gradients are reduced.

    Ops that are added to the graph after `wait_for_all` wait for all gradients. In a
    program that XLA compiles only data orders ops. Eagerly a step waits anyway.

    Example:

    >>> with WholeStep() as step:
    ...     step.wait_for_all([1.0], counts=[])
    [1.0]
    """

    def __init__(self) -> None:
        super().__init__()
        self._zero: tf.Tensor | None = None

    def wait_for_all(self, grads: Sequence[Any], counts: Iterable[Any]) -> list[Any]:
        """The same gradients, of which none is used before all are reduced.

        `counts` are variables that change whatever the gradients are, perhaps in
        another part of the graph.
        """
        if tf.executing_eagerly():
            return list(grads)
        tensors = [*map(_tensor, grads)]
        if not submission.is_compiled() and gradients.are_on_gpu(tensors):
            return list(grads)
        same, zero = native.ops().keras_hvd_whole_step(tensors)
        self._zero = zero
        self.delay(counts)
        self.enter_context(tf.control_dependencies([zero]))
        return [
            _later(grad, zero) if isinstance(grad, tf.IndexedSlices) else each
            for grad, each in zip(grads, same, strict=True)
        ]

    def delay(self, variables: Iterable[Any]) -> None:
        """Makes the values that variables have got so far wait for all gradients."""
        if self._zero is None:
            return
        for each in variables:
            each.assign_add(tf.cast(self._zero, each.dtype))


def _tensor(grad: Any) -> tf.Tensor:
    """A gradient, or a number that is known once all of its slices are there.

    XLA may know their number only as the program runs, and the op takes no such shape.
    """
    is_sparse = isinstance(grad, tf.IndexedSlices)
    return tf.reduce_max(grad.indices) if is_sparse else grad


def _later(grad: tf.IndexedSlices, zero: tf.Tensor) -> tf.IndexedSlices:
    values = grad.values + tf.cast(zero, grad.dtype)
    return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
