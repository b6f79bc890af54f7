"""Files of /proc, which a container may hide."""

from __future__ import annotations

import os
from pathlib import Path


def lines_of(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a file; none if it cannot be read.

    Example:

    >>> lines_of("/proc/no/such/file")
    []
    """
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
