"""TFRecords and lines of text, as strings."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from keras_hvd.data.readers.reader import Reader, check_compression


@dataclasses.dataclass
class _Strings(Reader):
    compression: str = ""

    def __post_init__(self) -> None:
        check_compression(self.compression)


@dataclasses.dataclass
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

    def open(self, path: tf.Tensor, group: tf.Tensor) -> tf.data.Dataset:
        return tf.data.TFRecordDataset(path, self.compression)


@dataclasses.dataclass
class Text(_Strings):
    """Lines, as strings without line ends."""

    def open(self, path: tf.Tensor, group: tf.Tensor) -> tf.data.Dataset:
        return tf.data.TextLineDataset(path, self.compression)
