"""Leaves the job when the script has ended but one of its threads keeps Python waiting.

Python waits for all threads that are no daemons before it calls `atexit` functions.
This process would leave the job only then, and the other ranks would wait for it for
ever.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - see watch()
import contextlib
import ctypes
import functools
import multiprocessing.util  # noqa: F401 - its atexit function, too
import sys
import threading
import time
from typing import Any

from keras_hvd.job import basics, log, native

# How long threads may take to end. The other ranks are to learn of it within two
# seconds.
_PATIENCE = 1.0
_PATIENCE_AFTER_FAILURE = 0.3

_MOST_NAMED = 3
_LONGEST_REASON = 200

# A thread within one of these packages may be running a step.
_RUNS_STEPS = ("tensorflow.python.eager", "keras_hvd")

# The threads that have submitted or traced collectives. A later thread may have got the
# number of one, and then counts too.
_with_collectives: set[int] = set()

# The exception that was on record before this process joined a job.
_failed_before: Any = None


def note_collective() -> None:
    """Records that this thread uses collectives, so the rank stays as long as it runs.

    Example:

    >>> note_collective()
    >>> threading.get_ident() in _with_collectives
    True
    """
    _with_collectives.add(threading.get_ident())


@functools.cache
def watch() -> None:
    """From now on, this process leaves its job when its script has ended.

    Except while a thread goes on with collectives, if the script ended without an
    exception.

    Example:

    >>> watch()
    """
    global _failed_before
    _failed_before = getattr(sys, "last_value", None)
    # Python runs such functions before it waits for threads, the last one first. The
    # function of concurrent.futures, which waits for the threads of executors, is
    # imported above. So is the one that waits for the processes of multiprocessing,
    # behind `shutdown`. If the script has ended already, a thread of it joins the job,
    # and goes on.
    with contextlib.suppress(RuntimeError):
        threading._register_atexit(_script_has_ended)  # type: ignore[attr-defined]


def _script_has_ended() -> None:
    # A process forked by multiprocessing comes here too, and is in no job.
    if not basics.is_initialized() or basics.size() == 1 or not _staying():
        return
    watcher = threading.Thread(target=_leave_if_they_stay, daemon=True)
    try:
        watcher.start()
    except RuntimeError as error:
        log.write(
            "warning",
            f"{error}, to leave the job if {_named(_staying())} stay after the end of "
            "the script: other ranks may wait for this one",
        )


def _leave_if_they_stay() -> None:
    error = getattr(sys, "last_value", None)
    failed = error is not None and error is not _failed_before
    patience = _PATIENCE_AFTER_FAILURE if failed else _PATIENCE
    goes_on = True
    while goes_on:
        ended_before = _requests_ended()
        deadline = time.monotonic() + patience
        for thread in _staying():
            thread.join(max(0, deadline - time.monotonic()))
        staying = _staying()
        if not staying or not basics.is_initialized():
            return
        submits = _requests_ended() > ended_before
        goes_on = not failed and (submits or any(map(_has_collectives, staying)))
    how = "its script has ended" + (_reason(error) if failed else "")
    verb = "stays" if len(staying) == 1 else "stay"
    text = f"{how}, and {_named(staying)} {verb}"
    native.engine().khvd_leave(text.encode(errors="replace"))


def _staying() -> list[threading.Thread]:
    """The threads that Python waits for at the end of the script."""
    return [
        thread
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]


def _has_collectives(thread: threading.Thread) -> bool:
    """Whether a thread has used collectives, or may be running a traced step now."""
    if thread.ident in _with_collectives:
        return True
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_RUNS_STEPS):
            return True
        frame = frame.f_back
    return False


def _requests_ended() -> int:
    counters = native.Counters()
    native.engine().khvd_get_counters(ctypes.byref(counters))
    return counters.tensors


def _reason(error: Any) -> str:
    lines = str(error).splitlines()
    text = type(error).__name__ + (f": {lines[0]}" if lines else "")
    return f" with {text[:_LONGEST_REASON]}"


def _named(threads: list[threading.Thread]) -> str:
    """The threads' names, to begin or end a clause.

    Example:

    >>> _named([threading.Thread(name="reader")])
    "its thread 'reader'"
    """
    names = ", ".join(repr(thread.name) for thread in threads[:_MOST_NAMED])
    more = ", ..." if len(threads) > _MOST_NAMED else ""
    return f"its thread{'s' if len(threads) > 1 else ''} {names}{more}"
