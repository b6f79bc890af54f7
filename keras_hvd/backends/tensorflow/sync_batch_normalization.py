"""SyncBatchNormalization: batch normalization with statistics of all ranks' data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_hvd.backends.labels import name_in_program
from keras_hvd.backends.tensorflow.collectives import contributions, job_values
from keras_hvd.backends.tensorflow.collectives.allgather import allgather
from keras_hvd.backends.tensorflow.collectives.graph_names import name_in_graph
from keras_hvd.job import arrival, basics, later_jobs
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of


@keras.saving.register_keras_serializable(package="keras_hvd")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization with the mean and variance of all ranks' batches.

    Forward and backward passes are those of one process with all the batches, even if
    they differ in size or have masks. Each pass costs one collective of three numbers
    per channel. Every rank must run it in each training step; without training
    (`evaluate`, `predict`) it needs no other rank.

    Args:
        fused: must be False or omitted, as in Horovod.
        process_set: the ranks whose batches count; by default all of them. It is not
            saved with the layer.
        **arguments: those of `keras.layers.BatchNormalization`.

    Raises:
        ValueError: `fused`, `renorm` or `synchronized` is set, or the process set is
            not part of the job.

    Example:

    >>> import keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> layer = keras_hvd.SyncBatchNormalization()
    >>> layer(np.array([[1.0], [3.0]]), training=True).numpy().round(2)
    array([[-1.],
           [ 1.]], dtype=float32)
    """

    def __init__(
        self,
        fused: bool = False,
        process_set: ProcessSet = global_process_set,
        **arguments: Any,
    ):
        for name, given in {"fused": fused, **arguments}.items():
            if name in ("fused", "renorm", "synchronized") and given:
                raise ValueError(
                    f"SyncBatchNormalization does not support {name}={given!r}"
                )
        number_of(process_set, "SyncBatchNormalization")
        super().__init__(**arguments)
        self.process_set = process_set

    def _moments(self, inputs, mask):
        basics.require_initialized("SyncBatchNormalization")
        process_set = self.process_set
        number = number_of(process_set, "SyncBatchNormalization")
        is_alone = process_set.size() == 1 and process_set.included()
        if is_alone and not later_jobs.are_possible():
            job_values.require_as_traced("size", process_set=number)
            return super()._moments(inputs, mask)
        name = name_in_graph(f"{name_in_program(self, number)}/moments")
        axes = self._reduction_axes
        return _moments_over_ranks(inputs, mask, axes, name, process_set)


def _moments_over_ranks(
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
