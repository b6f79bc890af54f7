"""Avro files, through tensorflow-io."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_hvd.data.readers import tensorflow_io
from keras_hvd.data.readers.reader import Reader

# Number of records that are parsed at once.
_PARSED = 128


@dataclasses.dataclass
class Avro(Reader):
    """Records, as dicts of tensors; as strings without `features`.

    `schema` is the reader's schema in JSON. `features` are those of
    `tfio.experimental.columnar.parse_avro`.
    """

    schema: str
    features: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        reason = tensorflow_io.why_not()
        if reason:
            raise ImportError(
                f"from_files: Avro files are read through {tensorflow_io.VERSIONS}: "
                f"{reason}. Otherwise give from_files a reader of your own: a function "
                "from a file's name to a dataset"
            )

    def open(self, path: tf.Tensor, group: tf.Tensor) -> tf.data.Dataset:
        columnar = tensorflow_io.load().experimental.columnar
        records = columnar.AvroRecordDataset(path, reader_schema=self.schema)
        if self.features is None:
            return records
        return (
            records.batch(_PARSED)
            .map(lambda each: columnar.parse_avro(each, self.schema, self.features))
            .unbatch()
        )
