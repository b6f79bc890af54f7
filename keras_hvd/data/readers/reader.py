"""What all readers have in common."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Reader:
    """Opens files of one format. A dataclass whose fields are its options."""

    format: Any = None
    """What rank 0 learned of the files' format, the same on all ranks; for pickle."""

    def learn(self, path: str) -> None:
        """Looks into a file for what all of them have in common.

        Runs on one rank; what it learns is `format`.

        Args:
            path: the first file.

        Raises:
            ValueError: it is not of this format.
        """

    def groups(self, path: str, size: int) -> list[tuple[int, int]]:
        """What a file is read in. Runs on one rank, in several threads.

        Args:
            path: the file.
            size: in bytes.

        Returns:
            Pairs of a row group's number, or -1 for the whole file, and its size.
        """
        return [(-1, size)]

    def open(self, path: tf.Tensor, group: tf.Tensor) -> tf.data.Dataset:
        """The samples of a file, in a graph.

        Args:
            path: a string scalar.
            group: an int64 scalar, one of `groups`.

        Returns:
            A dataset, each time of the same samples in the same order.
        """
        raise NotImplementedError


def check_compression(compression: str) -> None:
    """Raises unless tf.data has a compression.

    Args:
        compression: what the user gave.

    Raises:
        ValueError: it is none of those.

    Example:

    >>> check_compression("GZIP")
    """
    if compression not in ("", "GZIP", "ZLIB"):
        raise ValueError(
            f"from_files: compression must be '', 'GZIP' or 'ZLIB', got {compression!r}"
        )
