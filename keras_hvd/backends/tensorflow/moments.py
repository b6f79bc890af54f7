"""Mean and variance over all ranks' rows, for SyncBatchNormalization."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from keras_hvd.backends.tensorflow.collectives import contributions, job_values
from keras_hvd.backends.tensorflow.collectives.allgather import allgather
from keras_hvd.job import arrival
from keras_hvd.job.process_sets import ProcessSet, number_of


def moments_over_ranks(
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
    axes: list[int],
    name: str,
    process_set: ProcessSet,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of each channel over the rows of all ranks.

    Each rank contributes its number of elements, their mean, and the sum of their
    squared deviations from it. Unlike sums of squares, these add up without
    cancellation.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> world = keras_hvd.global_process_set
    >>> [m.numpy() for m in moments_over_ranks(
    ...     tf.constant([[1.0], [3.0]]), None, [0], "moments", world)]
    [array([2.], dtype=float32), array([1.], dtype=float32)]
    """
    if mask is not None:
        mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
    of_channel = [1 if axis in axes else -1 for axis in range(inputs.shape.rank)]
    count = _count(inputs, mask, axes)
    mean = tf.math.divide_no_nan(tf.reduce_sum(_masked(inputs, mask), axes), count)
    deviations = _masked(inputs - tf.reshape(mean, of_channel), mask)
    squares = tf.reduce_sum(tf.square(deviations), axes)
    number = number_of(process_set, "SyncBatchNormalization")
    own = _with_gradient_times_size_of(number, tf.stack([count, mean, squares]))
    # A rank without rows gives a count of 0.
    with contributions.as_given(), arrival.within_step():
        of_ranks = allgather(own[None], name=name, process_set=process_set)
    counts, means, squares = tf.unstack(of_ranks, num=3, axis=1)
    count = tf.reduce_sum(counts, axis=0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, axis=0), count)
    between = counts * tf.square(means - mean)
    variance = tf.math.divide_no_nan(tf.reduce_sum(squares + between, axis=0), count)
    return mean, variance


def _with_gradient_times_size_of(process_set: int, values: tf.Tensor) -> tf.Tensor:
    """Scales gradients: an allgather averages them, but statistics need their sum."""

    @tf.custom_gradient
    def identity(values: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def times_size(gradient: tf.Tensor) -> tf.Tensor:
            return gradient * tf.cast(job_values.size_of(process_set), gradient.dtype)

        return tf.identity(values), times_size

    return identity(values)


def _count(inputs: tf.Tensor, mask: tf.Tensor | None, axes: list[int]) -> tf.Tensor:
    """The number of elements of each channel."""
    if mask is not None:
        return tf.reduce_sum(tf.cast(mask, inputs.dtype), axes)
    [channels] = [n for axis, n in enumerate(inputs.shape) if axis not in axes]
    return tf.fill([channels], tf.cast(tf.size(inputs) // channels, inputs.dtype))


def _masked(values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    return values if mask is None else tf.where(mask, values, tf.zeros_like(values))
