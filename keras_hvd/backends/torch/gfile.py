"""Files of backups, with the names of `tf.io.gfile`; on paths of this machine alone."""

from __future__ import annotations

import os
import shutil
from typing import Any


def exists(path: str) -> bool:
    """Whether a file or folder exists.

    >>> exists(os.devnull)
    True
    """
    return os.path.exists(_local(path))


def rmtree(path: str) -> None:
    """Removes a folder."""
    shutil.rmtree(_local(path))


def makedirs(path: str) -> None:
    """Makes a folder, unless it is there, and those around it."""
    os.makedirs(_local(path), exist_ok=True)


def rename(path: str, to: str, overwrite: bool) -> None:
    """Moves a file, also to the place of another."""
    assert overwrite, "every file of a backup replaces the one before"
    os.replace(path, to)


def GFile(path: str, mode: str) -> Any:
    """Opens a file."""
    return open(_local(path), mode)


def _local(path: str) -> str:
    if "://" in path:
        raise NotImplementedError(
            f"{path} is not on this machine, and backups of Keras on torch must be: "
            "give BackupAndRestore a folder that is mounted"
        )
    return path
