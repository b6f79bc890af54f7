"""Writes lines to standard error in the engine's format."""

from __future__ import annotations

import warnings

from keras_hvd.job import native, settings


def write(level: str, text: str) -> None:
    """Writes a line if `KERAS_HVD_LOG_LEVEL` allows `level`, one of `LOG_LEVELS`.

    Example:

    >>> write("debug", "of interest to few")
    """
    number = settings.LOG_LEVELS.index(level) + 1
    native.engine().khvd_log(number, text.encode())


def warn(text: str, stacklevel: int = 1) -> None:
    """Raises a Python warning if `KERAS_HVD_LOG_LEVEL` allows warnings.

    As for `warnings.warn`, a `stacklevel` of 1 stands for the caller's line.
    """
    if settings.read().log_level <= settings.LOG_LEVELS.index("warning") + 1:
        warnings.warn(text, stacklevel=stacklevel + 1)
