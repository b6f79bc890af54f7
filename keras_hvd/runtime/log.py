"""Lines for people on standard error, as the engine writes its own."""

from __future__ import annotations

import warnings

from keras_hvd.runtime import native, settings


def write(level: str, text: str) -> None:
    """Writes a line, if `KERAS_HVD_LOG_LEVEL` allows it.

    Args:
        level: one of `settings.LOG_LEVELS`.
        text: the line, without its end.

    Raises:
        ValueError: there is no such level.

    Example:

    >>> write("debug", "of interest to few")
    """
    number = settings.LOG_LEVELS.index(level) + 1
    native.engine().khvd_log(number, text.encode())


def warn(text: str, stacklevel: int = 1) -> None:
    """Warns as Python does, if `KERAS_HVD_LOG_LEVEL` allows warnings.

    Args:
        text: what to say.
        stacklevel: whose line it is about: 1 for the caller's, 2 for its caller's.

    Raises:
        ValueError: an environment variable of keras_hvd is malformed.

    Example:

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn("it goes on, but not as it should")
    >>> len(caught)
    1
    """
    if settings.read().log_level <= settings.LOG_LEVELS.index("warning") + 1:
        warnings.warn(text, stacklevel=stacklevel + 1)
