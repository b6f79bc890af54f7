"""TFRecords and lines of text, as strings."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf

from keras_hvd.data.readers.reader import Reader, check_compression


@dataclasses.dataclass
class _Strings(Reader):
    compression: str = ""

    dataset: ClassVar[type[tf.data.Dataset]]

    def __post_init__(self) -> None:
        check_compression(self.compression)

    def open(self, path: tf.Tensor, group: tf.Tensor) -> tf.data.Dataset:
        return self.dataset(path, self.compression)


class TFRecord(_Strings):
    """Records, as strings.

    Example:

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     with tf.io.TFRecordWriter(file.name) as writer:
    ...         writer.write(b"first")
    ...     list(TFRecord().open(file.name, -1).as_numpy_iterator())
    [b'first']
    """

    dataset = tf.data.TFRecordDataset


class Text(_Strings):
    """Lines, as strings without line ends."""

    dataset = tf.data.TextLineDataset
