"""Tells the `khvdrun` of a host that its ranks have met all others."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping

_VARIABLE = "KERAS_HVD_JOINED"


class Pipe:
    """What ranks inherit of `khvdrun`, and write to when they have met.

    Example:

    >>> pipe = Pipe()
    >>> tell(pipe.variables)
    >>> os.read(pipe.fileno(), 9)
    b'!'
    """

    def __init__(self) -> None:
        self._reads, self.written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        """What is readable when a rank has met all others."""
        return self._reads

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks are told."""
        return {_VARIABLE: f"{self.written}:{os.fstat(self.written).st_ino}"}


def tell(variables: Mapping[str, str]) -> None:
    """Tells it that this process has met all other ranks, if it wants to know.

    Example:

    >>> tell({})
    """
    descriptor, _, inode = variables.get(_VARIABLE, "").partition(":")
    # In a process that has not inherited it, the number may be another file's.
    with contextlib.suppress(OSError, ValueError):
        status = os.fstat(int(descriptor))
        if stat.S_ISFIFO(status.st_mode) and status.st_ino == int(inode):
            os.write(int(descriptor), b"!")
