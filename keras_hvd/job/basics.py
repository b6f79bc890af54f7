"""Leaving the job, this process' place in it, and errors of the engine."""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from keras_hvd import exceptions
from keras_hvd.job import later_jobs, native


class Epoch(NamedTuple):
    """A job that this process has joined, as the others know it too."""

    number: int  # among those that it has joined, from 1
    job: str


_epoch = Epoch(0, "")
_uses_mpi = False


_before_ends: list[Callable[[int | None], object]] = []


def before_an_end(act: Callable[[int | None], object]) -> None:
    """Calls `act` before a process set ends, with its number, or the job, with None."""
    _before_ends.append(act)


def prepare_end(process_set: int | None = None) -> None:
    """Lets what works beside the training end with the process set, or with the job."""
    for act in _before_ends:
        act(process_set)


def shutdown() -> None:
    """Leaves the job; pending collectives of this rank fail.

    Harmless before `init` and after another `shutdown`. It also runs when Python exits.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.shutdown()
    >>> keras_hvd.is_initialized()
    False
    """
    try:
        if is_initialized():
            prepare_end()
    finally:
        # Also where warnings are errors.
        check(native.engine().khvd_shutdown())


def is_initialized() -> bool:
    """Whether this process is in the job.

    Returns:
        True between `init` and `shutdown`.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.is_initialized()
    True
    """
    return native.engine().khvd_is_initialized() == 1


def rank() -> int:
    """This process' number in the job; `arrival` has the one for users."""
    return _place("rank")


def size() -> int:
    """The number of processes in the job; `arrival` has the one for users."""
    return _place("size")


def local_rank() -> int:
    """This process' number on its host; `arrival` has the one for users."""
    return _place("local_rank")


def local_size() -> int:
    """The number of the job's processes on this host.

    Returns:
        At least 1.

    Raises:
        NotInitializedError: `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.local_size()
    1
    """
    return _place("local_size")


def cross_rank() -> int:
    """This host's number among the hosts that have a process of this local rank.

    Returns:
        0 to `cross_size() - 1`.

    Raises:
        NotInitializedError: `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.cross_rank()
    0
    """
    return _place("cross_rank")


def cross_size() -> int:
    """The number of hosts that have a process of this local rank.

    Returns:
        At least 1.

    Raises:
        NotInitializedError: `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.cross_size()
    1
    """
    return _place("cross_size")


def check(code: int) -> None:
    """Raises the error for a code of the C API other than 0, with its message."""
    if code == 0:
        return
    message = native.engine().khvd_last_error().decode(errors="replace")
    raise exceptions.from_code(code, message)


def counters() -> native.Counters:
    """What the engine has done since `init`. Raises outside of a job."""
    found = native.Counters()
    check(native.engine().khvd_get_counters(ctypes.byref(found)))
    return found


def require_initialized(function: str) -> None:
    """Raises unless this process is in the job; `function` is the public caller's name.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.shutdown()
    >>> require_initialized("allreduce")
    Traceback (most recent call last):
    keras_hvd.exceptions.ShutDownError: keras_hvd.allreduce(): keras_hvd was shut ...
    """
    if not is_initialized():
        raise _outside(function)


def require_not_forked(function: str) -> None:
    """Raises if this process was forked from a rank; `function` is the caller's name.

    Example:

    >>> require_not_forked("init")
    """
    error = _outside(function)
    if isinstance(error, exceptions.ForkedError):
        raise error


def whole_number(function: str, argument: str, value: Any) -> int:
    """Returns an argument as an int, or raises TypeError.

    Example:

    >>> whole_number("broadcast", "root_rank", 1.0)
    Traceback (most recent call last):
    TypeError: broadcast: root_rank must be a whole number; got 1.0
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{function}: {argument} must be a whole number; got {value!r}"
        ) from None


def root_of(function: str, root_rank: Any) -> int:
    """Returns `root_rank` as an int of 32 bits; the engine checks that the rank exists.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> root_of("broadcast", 2**32)
    Traceback (most recent call last):
    keras_hvd.exceptions.MismatchError: broadcast: root_rank 4294967296 is not in 0..0
    """
    number = whole_number(function, "root_rank", root_rank)
    if -(2**31) <= number < 2**31:
        return number
    raise exceptions.MismatchError(
        f"{function}: root_rank {number} is not in 0..{size() - 1}"
    )


def epoch() -> Epoch:
    """The job that this process has joined last, alike on all ranks; number 0 before.

    A holder of a rank, a size or other values of a job keeps this beside them.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> epoch().number > 0
    True
    """
    return _epoch


def begin_epoch(job: str, uses_mpi: bool) -> None:
    """Records that this process has joined another job, of this name."""
    global _epoch, _uses_mpi
    _epoch = Epoch(_epoch.number + 1, job)
    _uses_mpi = uses_mpi


def uses_mpi() -> bool:
    """Whether MPI carries tensors between the hosts of this process' job."""
    return _uses_mpi and is_initialized()


def _place(function: str) -> int:
    later_jobs.note_read(function, sys._getframe(2))
    value = getattr(native.engine(), f"khvd_{function}")()
    if value < 0:
        raise _outside(function)
    return value


def _outside(function: str) -> exceptions.KerasHvdError:
    """The error that says why this process is in no job."""
    engine = native.engine()
    code = engine.khvd_get_counters(ctypes.byref(native.Counters()))
    return exceptions.from_code(
        code, f"keras_hvd.{function}(): {engine.khvd_last_error().decode()}"
    )
