"""The base class of readers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


class Reader:
    """Opens files of one format. A dataclass whose fields are the options."""

    format: Any = None
    """The format that rank 0 has learned. Pickled and sent to all ranks."""

    def learn(self, path: str) -> None:
        """Learns all files' properties from the first, into `format`, on one rank.

        Raises ValueError if the file has another format.
        """

    def groups(self, path: str, size: int) -> list[tuple[int, int]]:
        """A file's row groups and their sizes; -1 stands for the whole file.

        Runs on one rank, in several threads.
        """
        return [(-1, size)]

    def open(self, path: tf.Tensor, group: tf.Tensor) -> tf.data.Dataset:
        """The samples of a file or of a row group, always in the same order."""
        raise NotImplementedError


def require_columns(path: str, wanted: Iterable[str], there: Iterable[str]) -> None:
    """Raises ValueError for a wanted column that is not in the file."""
    for name in wanted:
        if name not in there:
            raise ValueError(
                f"from_files: {path!r} has no column {name!r}; it has "
                + ", ".join(map(repr, there))
            )


def check_compression(compression: str) -> None:
    """Raises ValueError unless tf.data has this compression.

    Example:

    >>> check_compression("GZIP")
    """
    if compression not in ("", "GZIP", "ZLIB"):
        raise ValueError(
            f"from_files: compression must be '', 'GZIP' or 'ZLIB', got {compression!r}"
        )
