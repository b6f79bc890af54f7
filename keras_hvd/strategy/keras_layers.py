"""Layers under a strategy: ranks without rows, and random numbers.

In loops by hand a rank may have no rows. Many layers cannot compute on none, so a model
gets one row of zeros there, and its results are left out.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn as keras_nn

from keras_hvd.backends.sync_batch_normalization import SyncBatchNormalization
from keras_hvd.backends.tensorflow import current_strategy, random_numbers
from keras_hvd.strategy import keras_patches, no_rows


@keras_patches.replaces(keras.layers.Layer, "__call__")
def _call(plain, layer, *args, **kwargs):
    if not isinstance(layer, keras.Model) or no_rows.is_open():
        return plain(layer, *args, **kwargs)
    strategy = current_strategy.several_ranks(current_strategy.of_replica())
    batch = next(filter(_is_batch, tf.nest.flatten([args, kwargs])), None)
    if strategy is None or batch is None or batch.shape[0]:
        return plain(layer, *args, **kwargs)
    has_rows = tf.shape(batch)[0] > 0
    padded = keras.tree.map_structure(
        lambda each: _with_a_row(each, has_rows), (args, kwargs)
    )
    with no_rows.of_batch(padded, has_rows) as (args, kwargs):
        outputs = plain(layer, *args, **kwargs)
    return keras.tree.map_structure(
        lambda each: _without_the_row(each, has_rows), outputs
    )


def _is_batch(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank not in (None, 0)


def _with_a_row(tensor: Any, has_rows: tf.Tensor) -> Any:
    if not _is_batch(tensor):
        return tensor
    rest = tensor.shape[1:]
    # Padding may have no length, where no row has one.
    others = rest if rest.is_fully_defined() else tf.maximum(tf.shape(tensor)[1:], 1)
    shape = tf.concat([[1], others], 0)
    padded = _either(has_rows, lambda: tensor, lambda: tf.zeros(shape, tensor.dtype))
    padded.set_shape([None, *rest])
    return padded


def _without_the_row(tensor: Any, has_rows: tf.Tensor) -> Any:
    if isinstance(tensor, tf.RaggedTensor):
        return tensor[: tf.where(has_rows, tensor.nrows(), 0)]
    if not _is_batch(tensor):
        return tensor
    rows = _either(has_rows, lambda: tensor, lambda: tensor[:0])
    rows.set_shape([None, *tensor.shape[1:]])
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        rows._keras_mask = _without_the_row(mask, has_rows)
    return rows


def _either(has_rows, if_rows, if_none):
    # The results' shapes differ. Unlike with tf.cond, XLA compiles only the branch for
    # this rank's number of rows.
    return tf.switch_case(tf.cast(has_rows, tf.int32), [if_none, if_rows])


@keras_patches.replaces(keras.layers.BatchNormalization, "_moments")
def _moments(plain, layer, inputs, mask):
    if not layer.synchronized:
        return plain(layer, inputs, mask)
    strategy = current_strategy.several_ranks(current_strategy.of_replica())
    if mask is not None and strategy is not None:
        return _masked_moments(inputs, mask, layer._reduction_axes)
    has_rows = no_rows.has_rows()
    if has_rows is None:
        return plain(layer, inputs, mask)
    # Eager tensors do not show that their number is a number of rows.
    if tf.executing_eagerly() and not has_rows:
        inputs = inputs[:0]
    return plain(layer, inputs, mask)


def _masked_moments(inputs, mask, axes):
    """Keras' moments of the values that a mask keeps, over all ranks."""
    reduce = tf.distribute.get_replica_context().all_reduce
    mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))

    def total(values):
        return tf.reduce_sum(tf.where(mask, values, tf.zeros_like(values)), axes, True)

    both = reduce("SUM", [total(inputs), total(tf.ones_like(inputs))])
    count = both[1] + keras.config.epsilon()
    mean = both[0] / count
    variance = reduce("SUM", total(tf.square(inputs - mean))) / count
    return tf.squeeze(mean), tf.squeeze(variance)


@keras_patches.replaces(keras_nn, "_compute_moments_sync")
def _moments_of_replicas(plain, x, axes, keepdims):
    """Like Keras' function, with one collective for its three.

    One of Keras' three, of the number of rows, has a gradient only where a trace does
    not know that number. In a loop by hand that may be some ranks, which would wait.
    """
    if current_strategy.several_ranks(current_strategy.of_replica()) is None:
        return plain(x, axes, keepdims)
    given = x, tf.square(x), tf.ones_like(x)
    total, squares, count = tf.distribute.get_replica_context().all_reduce(
        "SUM", [tf.reduce_sum(each, axes, keepdims=True) for each in given]
    )
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.math.divide_no_nan(squares, count) - tf.square(mean)
    variance = tf.maximum(variance, 0.0)
    if keepdims:
        return mean, variance
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


@keras_patches.replaces(SyncBatchNormalization, "_moments")
def _moments_of_all(plain, layer, inputs, mask):
    """The moments of a `SyncBatchNormalization`: a mask marks the rows that count."""
    has_rows = no_rows.has_rows()
    if has_rows is None:
        return plain(layer, inputs, mask)
    if mask is None:
        mask = tf.ones(tf.shape(inputs)[:-1], tf.bool)
    return plain(layer, inputs, tf.cast(mask, tf.bool) & has_rows)


@keras_patches.replaces(keras.layers.RNN, "call")
def _call_rnn(plain, layer, sequences, *args, **kwargs):
    strategy = current_strategy.several_ranks(current_strategy.of_replica())
    if strategy is not None and layer.stateful and layer.states is not None:
        expected = keras.tree.flatten(layer.states)[0].shape[0]
        rows, ranks = sequences.shape[0], strategy.num_replicas_in_sync
        what = (
            f"{type(layer).__name__} {layer.name!r} is stateful, with "
            f"batch_shape=({expected}, ...). Under a keras_hvd.Strategy that is a "
            f"rank's part of each batch, which the {ranks} ranks share: as it is, the "
            f"model takes batches of {expected * ranks} rows"
        )
        if rows is None:
            what += f"; else make it with batch_shape=(batch_size / {ranks}, ...)"
            equal = tf.debugging.assert_equal(tf.shape(sequences)[0], expected, what)
            with tf.control_dependencies([equal]):
                sequences = tf.identity(sequences)
            results = plain(layer, sequences, *args, **kwargs)
            # An op that takes its rows from the states could fail before this check.
            return tf.nest.map_structure(no_rows.of_any_length, results)
        if rows != expected:
            raise ValueError(
                f"{what}, and this rank got {rows} rows; make it with "
                f"batch_shape=({rows}, ...) for batches of {rows * ranks}"
            )
    return plain(layer, sequences, *args, **kwargs)


@keras_patches.replaces(keras.random.SeedGenerator, "__init__")
def _make_seeds(plain, generator, *args, **kwargs):
    plain(generator, *args, **kwargs)
    strategy = tf.distribute.get_strategy()
    if current_strategy.is_ours(strategy):
        # The seed is the first rank's, but ranks must draw different numbers.
        rank = strategy.extended.process_set.rank()
        with tf.init_scope():
            random_numbers.continue_with_rank(generator, generator.state, rank)
