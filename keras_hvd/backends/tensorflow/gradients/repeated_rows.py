"""Adds up rows that occur several times in `tf.IndexedSlices`.

TensorFlow treats such rows as terms of a sum. Keras' optimizers and clipping treat each
row separately: Adam adds up squares where it should square the sum. After a gather,
every row that two ranks have occurs several times.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_hvd.backends.tensorflow.collectives import submission


def add_up(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the rows of slices that have the same index.

    XLA needs fixed shapes, so there the number of slices stays the same. A row's first
    occurrence gets the sum, and the others become zeros.

    >>> values, indices = tf.constant([[1.0], [2.0], [4.0]]), tf.constant([7, 5, 7])
    >>> added_up = add_up(tf.IndexedSlices(values, indices, tf.constant([9, 1])))
    >>> added_up.indices.numpy(), added_up.values.numpy().ravel()
    (array([7, 5], dtype=int32), array([5., 2.], dtype=float32))
    """
    if submission.is_compiled():
        indices = slices.indices
        count = tf.size(indices)
        places = _first_places(indices)
    else:
        indices, places = tf.unique(slices.indices)
        count = tf.size(indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, count)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def add_up_all(grads: Any) -> Any:
    """Adds up repeated rows in all sparse gradients of a structure.

    >>> add_up_all([None])
    [None]
    """
    return tf.nest.map_structure(
        lambda grad: add_up(grad) if isinstance(grad, tf.IndexedSlices) else grad, grads
    )


def _first_places(indices: tf.Tensor) -> tf.Tensor:
    """The position of the first occurrence of each index."""
    order = tf.argsort(indices, stable=True)
    ordered = tf.gather(indices, order)
    before = tf.concat([ordered[:1], ordered[:-1]], 0)
    run = tf.cumsum(tf.cast(ordered != before, order.dtype))
    count = tf.size(indices)
    first_of_run = tf.math.unsorted_segment_min(order, run, count)
    return tf.scatter_nd(order[:, None], tf.gather(first_of_run, run), [count])
