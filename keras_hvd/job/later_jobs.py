"""Later jobs of this process: whether there may be any, and what traces hold of one.

In a later job the size is another, and perhaps this rank's number. A trace of a step
that holds neither is right there too.
"""

from __future__ import annotations

import contextlib
import os
import threading
from types import FrameType

from keras_hvd.job.temporary import temporarily

VARIABLE = "KERAS_HVD_RENEWAL"
"""The variable of a rank that may go on in another job."""


class _Trace(threading.local):
    """The trace that a thread makes."""

    held: set[str] | None = None


_trace = _Trace()


def are_possible() -> bool:
    """Whether this process may go on in another job.

    What it traces is then for jobs of any size, also while it is alone.

    Example:

    >>> are_possible()
    False
    """
    return VARIABLE in os.environ


def noting(held: set[str]) -> contextlib.AbstractContextManager[None]:
    """Adds to `held` what a trace in this block holds of its job, such as "size".

    Example:

    >>> held = set()
    >>> with noting(held):
    ...     note_held("rank")
    >>> note_held("size")
    >>> held
    {'rank'}
    """
    return temporarily(_trace, "held", held)


def note_held(*quantities: str) -> None:
    """Notes that the trace under way, if there is one, holds numbers of this job."""
    if _trace.held is not None:
        _trace.held.update(quantities)


def note_read(quantity: str, reader: FrameType) -> None:
    """Notes that a function has read a number of this job, perhaps in a trace.

    keras_hvd's own functions note for themselves what their traces hold.
    """
    if _trace.held is None:
        return
    if reader.f_globals.get("__name__", "").partition(".")[0] != "keras_hvd":
        _trace.held.add(quantity)
