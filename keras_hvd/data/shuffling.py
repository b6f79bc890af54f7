"""A shuffle that can be entered anywhere: each window of samples is shuffled alone.

tf.data's shuffle buffer slides over the data, so its output up to some point does not
correspond to a prefix of the data. Here it corresponds to a prefix of the windows.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Fixed, so that the user's tf.random.set_seed does not change orders.
_GRAPH_SEED = 1


def shuffled(
    windows: tf.data.Dataset, size: int, seed: tf.Tensor, first: Any = 0
) -> tf.data.Dataset:
    """Shuffles the samples of each window, from `dataset.window(size)`.

    The order depends on the int64 scalar `seed` and on the window's number, which
    begins at `first`.

    Example:

    >>> seed = tf.constant(1, tf.int64)
    >>> numbers = tf.data.Dataset.range(6)
    >>> orders = [int(each) for each in shuffled(numbers.window(3), 3, seed)]
    >>> sorted(orders[:3]), sorted(orders[3:])
    ([0, 1, 2], [3, 4, 5])
    """

    def shuffle(number: tf.Tensor, window: Any) -> tf.data.Dataset:
        tf.random.set_seed(_GRAPH_SEED)  # of the graph of this function alone
        # A large odd factor keeps two pieces' windows from having the same seeds.
        mixed = (seed + number * 0x9E3779B1) % (2**31 - 1)
        samples = together(window)
        return samples.shuffle(size, mixed, reshuffle_each_iteration=False)

    return windows.enumerate(first).flat_map(shuffle)


def unshuffled(windows: tf.data.Dataset) -> tf.data.Dataset:
    """The samples of windows, from `dataset.window(size)`, in order."""
    return windows.enumerate().flat_map(lambda _, window: together(window))


def together(window: Any) -> tf.data.Dataset:
    """The samples of one window, which `Dataset.window` has split by components."""
    if isinstance(window, tf.data.Dataset):
        return window
    return tf.data.Dataset.zip(window)
