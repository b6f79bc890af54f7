"""Leaves rows that a rank lacks out of the collectives of a step.

These are the rules of `contributions.follow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_hvd.backends.reduce_op import Average, Max, Min, Product, ReduceOp
from keras_hvd.backends.tensorflow.collectives import contributions
from keras_hvd.job.process_sets import ProcessSet
from keras_hvd.strategy import no_rows
from keras_hvd.strategy.reduction import of_ranks_with_rows


def to_reduction(
    values: Sequence[Any], op: ReduceOp, process_set: ProcessSet
) -> tuple[list[Any], contributions.Restore]:
    """Values that change no result; for an average, with the way to the others' mean.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> given, _ = to_reduction([1.0], Average, keras_hvd.global_process_set)
    >>> given
    [1.0]
    """
    if op != Average:
        neutral = _neutral(op)
        return [no_rows.without_foreign(each, neutral) for each in values], list
    counts = no_rows.ranks_that_count()
    if counts is None:
        return list(values), list
    own = [no_rows.zero_unless(counts, _as_float(each)) for each in values]

    def restore(results: Sequence[Any]) -> list[Any]:
        means = of_ranks_with_rows(results, counts, process_set, None)
        size = process_set.size()
        pairs = zip(values, means, strict=True)
        return [_in_type_of(value, mean, size) for value, mean in pairs]

    return own, restore


def to_gather(value: tf.Tensor) -> tf.Tensor:
    """The rows that are this rank's own.

    >>> to_gather(tf.constant([1])).numpy().tolist()
    [1]
    """
    return no_rows.own_part(value, 0)


def _neutral(op: ReduceOp) -> Any:
    """Returns a function from a tensor to one that changes no other value."""
    if op == Product:
        return tf.ones_like
    if op not in (Min, Max):
        return tf.zeros_like

    def extreme(value: tf.Tensor) -> tf.Tensor:
        dtype, is_min = value.dtype, op == Min
        if dtype == tf.bool:
            limit: Any = is_min
        elif dtype.is_floating:
            limit = float("inf" if is_min else "-inf")
        else:
            limit = dtype.max if is_min else dtype.min
        return tf.fill(tf.shape(value), tf.constant(limit, dtype))

    return extreme


def _as_float(value: Any) -> Any:
    """The value, or floats for integers, whose average is divided once more."""
    if isinstance(value, tf.IndexedSlices):
        return value
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor, tf.float64) if tensor.dtype.is_integer else tensor


def _in_type_of(given: Any, mean: Any, ranks: int) -> Any:
    """The mean in the type of the given value; slices of integers have a float's."""
    if isinstance(mean, tf.IndexedSlices):
        return mean
    dtype = tf.convert_to_tensor(given).dtype
    if dtype.is_integer:
        # Integers are rounded towards zero. A mean that is no integer is further from
        # one than this.
        nearest = tf.round(mean)
        mean = tf.where(tf.abs(mean - nearest) * ranks < 0.5, nearest, mean)
    return tf.cast(mean, dtype)
