"""Files of any format, read by the user's function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from keras_hvd.data.readers.reader import Reader


@dataclasses.dataclass
class Function(Reader):
    """Files that a function opens: from a name, a string scalar, to a dataset.

    Example:

    >>> reader = Function(lambda path: tf.data.Dataset.from_tensors(path))
    >>> list(reader.open(tf.constant("a.txt"), tf.constant(-1)).as_numpy_iterator())
    [b'a.txt']
    """

    function: Callable[[tf.Tensor], tf.data.Dataset]

    def open(self, path: tf.Tensor, group: tf.Tensor) -> tf.data.Dataset:
        dataset = self.function(path)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"from_files: the reader must return a tf.data.Dataset, got {dataset!r}"
            )
        return dataset
