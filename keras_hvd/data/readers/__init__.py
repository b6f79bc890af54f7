"""The readers of `from_files`, one module for each format."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from keras_hvd.data.readers.avro import Avro
from keras_hvd.data.readers.csv import Csv
from keras_hvd.data.readers.function import Function
from keras_hvd.data.readers.lines import Text, TFRecord
from keras_hvd.data.readers.parquet import Parquet
from keras_hvd.data.readers.reader import Reader

_BY_NAME: dict[str, type[Reader]] = {
    "avro": Avro,
    "csv": Csv,
    "parquet": Parquet,
    "text": Text,
    "tfrecord": TFRecord,
}


def make(reader: str | Callable[..., Any], options: dict[str, Any]) -> Reader:
    """The reader for a format's name, or for a function from a name to a dataset.

    Raises TypeError or ValueError for a wrong reader or option, and ImportError if the
    format needs something that is not installed or does not load.

    Example:

    >>> make("text", {"compression": "GZIP"})
    Text(compression='GZIP')
    >>> make("text", {"columns": ["x"]})
    Traceback (most recent call last):
    TypeError: from_files: the reader 'text' has no option 'columns'; it has compression
    """
    if callable(reader):
        if options:
            raise TypeError(
                "from_files: a reader of your own takes no options, got "
                + ", ".join(options)
            )
        return Function(reader)
    if not isinstance(reader, str):
        raise TypeError(
            f"from_files: reader must be a name or a function, got {reader!r}"
        )
    if reader not in _BY_NAME:
        raise ValueError(
            f"from_files: there is no reader {reader!r}; there are "
            + ", ".join(sorted(_BY_NAME))
        )
    known = list(inspect.signature(_BY_NAME[reader]).parameters)
    for name in options:
        if name not in known:
            raise TypeError(
                f"from_files: the reader {reader!r} has no option {name!r}; it has "
                + ", ".join(known)
            )
    return _BY_NAME[reader](**options)
