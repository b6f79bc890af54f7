"""CSV files."""

from __future__ import annotations

import csv
import dataclasses
from typing import Any

import tensorflow as tf

from keras_hvd.data.readers.reader import Reader, check_compression, require_columns


@dataclasses.dataclass
class Csv(Reader):
    """Rows, as dicts of scalars. `from_files` documents the options.

    Example:

    >>> import tempfile
    >>> reader = Csv(columns={"age": 0, "name": ""}, header=False)
    >>> with tempfile.NamedTemporaryFile("w") as file:
    ...     print("7,Ann", file=file, flush=True)
    ...     [row] = reader.open(file.name, -1).as_numpy_iterator()
    >>> row["age"].item(), row["name"]
    (7, b'Ann')
    """

    columns: dict[str, Any] | None = None
    header: bool = True
    delimiter: str = ","
    compression: str = ""

    def __post_init__(self) -> None:
        check_compression(self.compression)
        if self.columns is None and not self.header:
            raise ValueError(
                "from_files: CSV files without a line of names need columns={name: "
                "type, ...} of all their columns"
            )
        if not isinstance(self.columns, (dict, type(None))) or self.columns == {}:
            raise TypeError(
                "from_files: columns must be a dict of names and types, such as "
                f"{{'x': tf.float32}}; got {self.columns!r}"
            )

    def learn(self, path: str) -> None:
        if not self.header:
            return
        first = tf.data.TextLineDataset(path, self.compression).take(1)
        line = b"".join(first.as_numpy_iterator())
        try:
            [names] = csv.reader([line.decode()], delimiter=self.delimiter)
        except (UnicodeDecodeError, ValueError):
            names = []
        if not names:
            raise ValueError(
                f"from_files: {path!r} does not begin with a line of names; say "
                "header=False if it has none"
            )
        require_columns(path, self.columns or (), names)
        self.format = (line, names)

    def open(self, path: tf.Tensor, group: tf.Tensor) -> tf.data.Dataset:
        if self.header:
            path = self._checked(path)
        names = self.format[1] if self.header else list(self.columns or ())
        columns = self.columns or dict.fromkeys(names, "")
        # tf.data needs the chosen columns in the order of the file.
        chosen = sorted(columns, key=names.index)
        rows = tf.data.experimental.CsvDataset(
            path,
            [_default(columns[name]) for name in chosen],
            compression_type=self.compression,
            header=self.header,
            field_delim=self.delimiter,
            select_cols=[names.index(name) for name in chosen],
        )
        return rows.map(lambda *row: dict(zip(chosen, row)))

    def _checked(self, path: tf.Tensor) -> tf.Tensor:
        """The path, after a check that the file has the first file's columns."""
        first = tf.data.TextLineDataset(path, self.compression).take(1)
        line = first.reduce(self.format[0], lambda _, line: line)
        alike = tf.debugging.Assert(
            tf.equal(line, self.format[0]),
            ["from_files: a file has other columns than the first:", path, line],
        )
        with tf.control_dependencies([alike]):
            return tf.identity(path)


def _default(value: Any) -> Any:
    """The value of an empty field; a type, if the field must not be empty."""
    return value if isinstance(value, tf.DType) else tf.reshape(value, [1])
