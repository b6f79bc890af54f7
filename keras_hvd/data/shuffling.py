"""A shuffle that can be entered anywhere: windows of samples, each shuffled by itself.

tf.data's shuffle buffer slides over the data, so that what was handed out of it is no
prefix of anything. Here the first samples of a window stay those of its order.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Of the graphs that shuffle; else the user's tf.random.set_seed would change orders.
_GRAPH_SEED = 1


def shuffled(
    windows: tf.data.Dataset, size: int, seed: tf.Tensor, first: Any = 0
) -> tf.data.Dataset:
    """Shuffles the samples of each window among each other.

    Args:
        windows: what `dataset.window(size)` gives.
        size: of a window.
        seed: an int64 scalar.
        first: the number of the first window; orders are a function of it and the seed.

    Returns:
        A dataset of the windows' samples.

    Example:

    >>> seed = tf.constant(1, tf.int64)
    >>> numbers = tf.data.Dataset.range(6)
    >>> orders = [int(each) for each in shuffled(numbers.window(3), 3, seed)]
    >>> sorted(orders[:3]), sorted(orders[3:])
    ([0, 1, 2], [3, 4, 5])
    >>> second = shuffled(numbers.skip(3).window(3), 3, seed, first=1)
    >>> [int(each) for each in second] == orders[3:]
    True
    """

    def shuffle(number: tf.Tensor, window: Any) -> tf.data.Dataset:
        tf.random.set_seed(_GRAPH_SEED)  # of the graph of this function alone
        # Times a large odd number: the seeds of two pieces' windows do not run alike.
        mixed = (seed + number * 0x9E3779B1) % (2**31 - 1)
        samples = together(window)
        return samples.shuffle(size, mixed, reshuffle_each_iteration=False)

    return windows.enumerate(first).flat_map(shuffle)


def unshuffled(windows: tf.data.Dataset) -> tf.data.Dataset:
    """The samples of windows in their order.

    Args:
        windows: what `dataset.window(size)` gives.

    Returns:
        A dataset of the windows' samples.

    Example:

    >>> [int(each) for each in unshuffled(tf.data.Dataset.range(4).window(3))]
    [0, 1, 2, 3]
    """
    return windows.enumerate().flat_map(lambda _, window: together(window))


def together(window: Any) -> tf.data.Dataset:
    """The samples of one window, which `tf.data.Dataset.window` has taken apart.

    Args:
        window: datasets, nested as a sample is.

    Returns:
        A dataset of samples.

    Example:

    >>> numbers = tf.data.Dataset.range(2)
    >>> [int(each["x"]) for each in together({"x": numbers})]
    [0, 1]
    """
    if isinstance(window, tf.data.Dataset):
        return window
    return tf.data.Dataset.zip(window)
