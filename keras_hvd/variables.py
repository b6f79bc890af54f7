"""Equal variables on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_hvd import basics
from keras_hvd.collectives import submission
from keras_hvd.collectives.broadcast import broadcast
from keras_hvd.process_sets import ProcessSet, global_process_set, number_of


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Sets every rank's variables to the root's values.

    All are under way at once, so many small ones cost little more than one. Works
    eagerly and in a `tf.function`.

    Args:
        variables: `tf.Variable`s, Keras variables, or anything with an `assign` that
            converts to a tensor; on every rank as many, of the same shapes and types
            in the same order.
        root_rank: the rank whose values they take, counted in the whole job.
        process_set: the ranks that take part; by default all of them.
        inplace: accepted for scripts that give it; it changes nothing.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        ValueError: the process set is not part of the job.
        TypeError: something cannot be assigned, or its element type not be sent.
        tf.errors.InvalidArgumentError: the ranks' variables or roots differ.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd, tensorflow as tf
    >>> keras_hvd.init()
    >>> weights = tf.Variable([1.0, 2.0])
    >>> keras_hvd.broadcast_variables([weights], root_rank=0)
    >>> weights.numpy()
    array([1., 2.], dtype=float32)
    """
    basics.require_initialized("broadcast_variables")
    number_of(process_set, "broadcast_variables")
    variables = list(variables)
    for variable in variables:
        if not callable(getattr(variable, "assign", None)):
            raise TypeError(
                "broadcast_variables takes variables, which have an assign method; "
                f"got {variable!r}"
            )
    if not tf.executing_eagerly():
        _broadcast(variables, root_rank, process_set)
        return

    # One after another, eager ops would each wait for the slowest rank.
    @tf.function(autograph=False)
    def eager() -> None:
        _broadcast(variables, root_rank, process_set)

    # Called as a function it would count as one that is traced again and again.
    eager.get_concrete_function()()


def _broadcast(variables: list[Any], root_rank: int, process_set: ProcessSet) -> None:
    with tf.name_scope("broadcast_variables"):
        # A rank with more variables than the others would wait for ever for these. The
        # shape of this tensor is their number, so that the engine's error names it.
        name = submission.name_of("one_element_per_variable", None).tensor
        number = broadcast(
            tf.zeros([len(variables)], tf.bool),
            root_rank,
            name,
            process_set=process_set,
        )
        with tf.control_dependencies([number]):
            values = [
                broadcast(variable, root_rank, process_set=process_set)
                for variable in variables
            ]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
