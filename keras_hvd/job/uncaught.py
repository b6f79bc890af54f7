"""Prints one line, not a traceback, if an exception ends a rank and needs no more.

Ranks that have not met are no fault of a line of the script. Ctrl-C reaches all ranks,
wherever they are. Each of them would print a traceback of its own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

from keras_hvd.job import said_once

# The exception with which this process failed to join the job.
_of_joining: BaseException | None = None


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """Marks an exception raised within: it needs no traceback if it ends this rank.

    From now on, an interrupt needs none either.

    Example:

    >>> with joining():
    ...     raise ValueError("a variable is malformed")
    Traceback (most recent call last):
    ValueError: a variable is malformed
    """
    global _of_joining
    _print_lines()
    try:
        yield
    except Exception as error:
        _of_joining = error
        raise


@functools.cache
def _print_lines() -> None:
    # A script that prints its exceptions itself continues to do so.
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print


def _print(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    is_interrupt = isinstance(error, KeyboardInterrupt)
    text = "".join(traceback.format_exception_only(error)).rstrip()
    if error is not _of_joining and not is_interrupt:
        said_once.tell_hidden(text)
        sys.__excepthook__(kind, error, trace)
        return
    where = _line_of_script(trace) if is_interrupt else ""
    sys.stderr.write(f"{text}{where}\n")


def _line_of_script(trace: TracebackType | None) -> str:
    """The script's place at the exception, to end a line of text; "" if unknown."""
    lines = [
        f" in line {number} of {frame.f_code.co_filename}"
        for frame, number in traceback.walk_tb(trace)
        if frame.f_globals.get("__name__") == "__main__"
    ]
    return lines[-1] if lines else ""
