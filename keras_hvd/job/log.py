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


class RankWarning(UserWarning):
    """A warning that any rank shows, not only rank 0."""


def warn(text: str, stacklevel: int = 1, from_any_rank: bool = False) -> None:
    """Raises a Python warning if `KERAS_HVD_LOG_LEVEL` allows warnings.

    As for `warnings.warn`, a `stacklevel` of 1 stands for the caller's line. Rank 0
    alone shows it, or any rank if it is about one, or given by one for all.
    """
    if settings.read().log_level <= settings.LOG_LEVELS.index("warning") + 1:
        category = RankWarning if from_any_rank else UserWarning
        warnings.warn(text, category, stacklevel=stacklevel + 1)
