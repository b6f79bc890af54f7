"""Lines for people on standard error, as the engine writes its own."""

from __future__ import annotations

from keras_hvd import native, settings


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
