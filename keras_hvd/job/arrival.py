"""A rank before it calls the function of `elastic.run`, where all are together.

In a job that ranks may join later, those are alone until then.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from keras_hvd.exceptions import NotInitializedError
from keras_hvd.job import basics, later_jobs
from keras_hvd.job.temporary import temporarily


class Place(NamedTuple):
    """The one that a rank is about to have."""

    rank: int
    size: int
    local_rank: int


# Whether this process has still to call the function, and whether it ever has.
_is_awaited = False
_has_arrived = False

# Whether the others are in a job already, without it.
_is_new = False
_to_come: Place | None = None


class _Thread(threading.local):
    is_within_step = False


_thread = _Thread()


def await_arrival(to_come: Place | None) -> None:
    """Records that what needs others has to wait for the function.

    `to_come` is the place of a rank that is alone until then.
    """
    global _is_awaited, _is_new, _to_come
    if not _has_arrived:
        _is_awaited, _is_new, _to_come = True, to_come is not None, to_come


def is_awaited() -> bool:
    """Whether this process has still to call the function."""
    return _is_awaited


def is_new() -> bool:
    """Whether this process is alone until it calls the function, and others are not.

    What rank 0 does for all ranks, it does for them.
    """
    return _is_new


def arrive() -> None:
    """Records that this process has called the function."""
    global _is_awaited, _has_arrived, _is_new, _to_come
    _is_awaited, _has_arrived, _is_new, _to_come = False, True, False, None


def require_arrived(function: str) -> None:
    """Raises unless the others are there; `function` is the public caller's name.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> require_arrived("allreduce")
    """
    basics.require_initialized(function)
    if _is_awaited and not _thread.is_within_step:
        raise NotInitializedError(
            f"keras_hvd.{function}() comes before the function of elastic.run. Ranks "
            "that join this job later are alone until they call that, so here they "
            "would get something else than the others: move the call into the "
            "function, or put what it gives into the state"
        )


@contextlib.contextmanager
def within_step() -> Iterator[None]:
    """Allows collectives of a training step, whose results are in the state.

    A step makes the variables of a model that a state is to have.
    """
    with temporarily(_thread, "is_within_step", True):
        yield


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets this process be the job of size 1 that it is, for what is taken back."""
    global _to_come
    to_come, _to_come = _to_come, None
    try:
        with within_step():
            yield
    finally:
        _to_come = to_come


def _place(quantity: str, here: Callable[[], int]) -> int:
    # Traces that hold a place to come are made anew in every job.
    told = quantity if _to_come is None else "a place to come"
    later_jobs.note_read(told, sys._getframe(2))
    found = here()
    return found if _to_come is None else getattr(_to_come, quantity)


def rank() -> int:
    """This process' number in the job.

    A rank that joins an elastic job later is told its place among the others before
    it calls the function of `elastic.run`. If more ranks come or go until then, its
    place in the function is another one.

    Returns:
        0 to `size() - 1`.

    Raises:
        NotInitializedError: `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.rank()
    0
    """
    return _place("rank", basics.rank)


def size() -> int:
    """The number of processes in the job.

    For a rank that joins an elastic job later it is the one to come, as of `rank`.

    Returns:
        At least 1.

    Raises:
        NotInitializedError: `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.size()
    1
    """
    return _place("size", basics.size)


def local_rank() -> int:
    """This process' number among those on its host.

    For a rank that joins an elastic job later it is the number of its slot, and so of
    its GPU, before it calls the function of `elastic.run`.

    Returns:
        0 to `local_size() - 1`.

    Raises:
        NotInitializedError: `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.local_rank()
    0
    """
    return _place("local_rank", basics.local_rank)
