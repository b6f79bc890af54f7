"""Files of strings: TFRecords, and lines of text."""

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

    Args:
        compression: "", "GZIP" or "ZLIB".
    """

    def open(self, path: tf.Tensor, group: tf.Tensor) -> tf.data.Dataset:
        return tf.data.TFRecordDataset(path, self.compression)


@dataclasses.dataclass
class Text(_Strings):
    """Lines, as strings without their ends.

    Args:
        compression: "", "GZIP" or "ZLIB".
    """

    def open(self, path: tf.Tensor, group: tf.Tensor) -> tf.data.Dataset:
        return tf.data.TextLineDataset(path, self.compression)
