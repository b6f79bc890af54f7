"""Makes variables equal on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_hvd.backends import equal_start
from keras_hvd.backends.tensorflow import half_applied
from keras_hvd.backends.tensorflow.collectives import submission
from keras_hvd.backends.tensorflow.collectives.broadcast import broadcast
from keras_hvd.job import arrival, basics, unnamed
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Sets every rank's variables to the root's values.

    All broadcasts run at the same time, so many small variables cost little more than
    one. Works eagerly, in a `tf.function`, and in a graph of `tf.compat.v1`.

    Args:
        variables: `tf.Variable`s, Keras variables, or anything with an `assign` that
            converts to a tensor. Every rank gives the same number, with the same shapes
            and types in the same order.
        root_rank: the rank that sends its values, counted in the whole job.
        process_set: the ranks that take part; by default all of them.
        inplace: accepted for compatibility; without effect.

    Returns:
        In a graph of `tf.compat.v1`, the op for a session to run; otherwise None.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        ValueError: the process set is not part of the job.
        TypeError: something cannot be assigned, an element type cannot be sent, or
            `root_rank` is not a whole number.
        tf.errors.FailedPreconditionError: the ranks' variables or roots differ.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd, tensorflow as tf
    >>> keras_hvd.init()
    >>> weights = tf.Variable([1.0, 2.0])
    >>> keras_hvd.broadcast_variables([weights], root_rank=0)
    >>> weights.numpy()
    array([1., 2.], dtype=float32)
    """
    arrival.require_arrived("broadcast_variables")
    number, *values = _broadcast(
        "broadcast_variables", variables, root_rank, None, process_set
    )
    return tf.group(number, *values) if submission.in_session_graph() else None


def broadcast_(
    variables: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sets every rank's variables to the root's values, and returns the values.

    Works eagerly, in a `tf.function`, and in a graph of `tf.compat.v1`, where
    evaluating one of the values sets the variables.

    Args:
        variables: a variable, or several, as for `broadcast_variables`.
        root_rank: the rank that sends its values, counted in the whole job.
        name: matches the call to the other ranks' calls; by default the op's name in
            its `tf.function`.
        process_set: the ranks that take part; by default all of them.

    Returns:
        The root's value of the variable, or a list of values.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: something cannot be assigned, an element type cannot be sent, or
            `root_rank` is not a whole number.
        ValueError: the process set is not part of the job.
        tf.errors.FailedPreconditionError: the ranks' variables or roots differ.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd, tensorflow as tf
    >>> keras_hvd.init()
    >>> keras_hvd.broadcast_(tf.Variable([1.0, 2.0]), root_rank=0).numpy()
    array([1., 2.], dtype=float32)
    """
    arrival.require_arrived("broadcast_")
    is_one = callable(getattr(variables, "assign", None))
    given = [variables] if is_one else variables
    _, *values = _broadcast("broadcast_", given, root_rank, name, process_set)
    return values[0] if is_one else values


def has_value(variable: Any) -> bool:
    """Whether a variable has a value: not in the trace of the step that creates it.

    >>> has_value(tf.Variable(1.0))
    True
    """
    value = getattr(variable, "value", None)
    value = variable if callable(value) else value
    is_initialized = getattr(value, "is_initialized", None)
    return is_initialized is None or bool(is_initialized())


def value_on_host(variable: Any) -> np.ndarray:
    """A variable's value, in its own memory where that is the host's.

    What assigns to the variable may change it.

    >>> value_on_host(tf.Variable([1.0, 2.0]))
    array([1., 2.], dtype=float32)
    """
    return np.asarray(tf.convert_to_tensor(variable))


def checksum(variable: Any) -> int:
    """A checksum of a Keras variable's value, of its own memory where it is the host's.

    >>> import keras
    >>> checksum(keras.Variable(1.0)) == checksum(keras.Variable(2.0))
    False
    """
    if variable.dtype == "string":
        return zlib.crc32(repr(variable.numpy().tolist()).encode())
    return zlib.crc32(tf.convert_to_tensor(variable.value))


def _broadcast(
    function: str,
    variables: Iterable[Any],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    """Whether each root value is suspect, then the root's values after assignment."""
    number_of(process_set, function)
    if name is not None:
        unnamed.require_name(function, name)
    root_rank = basics.root_of(function, root_rank)
    variables = list(variables)
    for variable in variables:
        if not callable(getattr(variable, "assign", None)):
            raise TypeError(
                f"{function} takes variables, which have an assign method; "
                f"got {variable!r}"
            )
    if not tf.executing_eagerly():
        # It runs later, when other variables may be suspect.
        nothing_known = [False] * len(variables)
        return _assign(function, variables, nothing_known, root_rank, name, process_set)

    equal_start.require_same_backend(process_set)
    suspect = [half_applied.is_suspect(each) for each in variables]

    # One after another, eager ops would each wait for the slowest rank.
    @tf.function(autograph=False)
    def eager() -> list[tf.Tensor]:
        return _assign(function, variables, suspect, root_rank, name, process_set)

    # Called directly, it would raise TensorFlow's warning about repeated tracing.
    suspect_there, *values = eager.get_concrete_function()()
    half_applied.receive(variables, suspect_there.numpy())
    return [suspect_there, *values]


def _assign(
    function: str,
    variables: list[Any],
    suspect: list[bool],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    def send(tensor: Any, part: str | None) -> tf.Tensor:
        of_part = f"{name}/{part}" if name and part else part
        return broadcast(tensor, root_rank, of_part, process_set=process_set)

    with tf.name_scope(function):
        # A rank with more variables than the others would wait for ever. This tensor's
        # shape is their number, so the engine's error contains it. Its elements
        # say which of the root's values are suspect.
        count = "one_element_per_variable"
        if name is None:
            count = submission.name_of(count, None).tensor
        with submission.on_cpu():
            number = send(tf.constant(suspect, tf.bool), count)
        with tf.control_dependencies([number]):
            values = [
                send(variable, name and str(place))
                for place, variable in enumerate(variables)
            ]
    # Not every kind of variable returns an op from `assign`.
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    with tf.control_dependencies([tf.group(*graph.get_operations()[before:])]):
        return [tf.identity(value) for value in (number, *values)]
