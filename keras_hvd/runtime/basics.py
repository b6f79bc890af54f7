"""Leaving the job, this process' place in it, and what went wrong in it."""

from __future__ import annotations

import ctypes
import operator
from typing import Any

from keras_hvd import exceptions
from keras_hvd.runtime import native

_jobs_joined = 0
_job = ""


def shutdown() -> None:
    """Leaves the job; what is still pending on this rank fails.

    Harmless before `init` and after another `shutdown`. Runs by itself when Python
    exits.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.shutdown()
    >>> keras_hvd.is_initialized()
    False
    """
    check(native.engine().khvd_shutdown())


def is_initialized() -> bool:
    """Whether this process has joined the job, and not left it.

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
    """This process' number in the job.

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
    return _place("rank")


def size() -> int:
    """The number of processes in the job.

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
    return _place("size")


def local_rank() -> int:
    """This process' number among those on its host.

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
    """Raises what a failed call of the C API means, with this thread's last error.

    Args:
        code: what the call returned.

    Raises:
        KerasHvdError: `code` is not 0; the subclass says what kind of failure.

    Example:

    >>> check(0)
    """
    if code == 0:
        return
    message = native.engine().khvd_last_error().decode(errors="replace")
    raise exceptions.from_code(code, message)


def require_initialized(function: str) -> None:
    """Raises unless this process has joined the job.

    Args:
        function: the public function that was called, for the message.

    Raises:
        NotInitializedError: `init` was not called.
        ShutDownError: `shutdown` was called since.
        ForkedError: this process was forked from a rank.

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


def whole_number(function: str, argument: str, value: Any) -> int:
    """An argument that counts something, such as a rank.

    Args:
        function: the public function that it was given to, for the message.
        argument: its name.
        value: what the user gave.

    Returns:
        The number.

    Raises:
        TypeError: it is something else.

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
    """The argument `root_rank`; whether there is such a rank is the engine's to say.

    Args:
        function: the public function that it was given to, for the message.
        root_rank: what the user gave.

    Returns:
        The number, which has 32 bits.

    Raises:
        TypeError: it is no whole number.
        MismatchError: it is one that no job has.

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


def job() -> str:
    """What tells the job that this process joined last from all others.

    Returns:
        The same on all ranks; "" if `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> job() != ""
    True
    """
    return _job


def note_job(launched: str) -> None:
    """Notes that this process has joined one more job.

    Args:
        launched: what the launcher calls it, the same on all ranks.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> before = job()
    >>> keras_hvd.shutdown()
    >>> note_job("another")
    >>> job() != before
    True
    """
    global _jobs_joined, _job
    _jobs_joined += 1
    _job = f"{launched}, {_jobs_joined}"


def _place(function: str) -> int:
    value = getattr(native.engine(), f"khvd_{function}")()
    if value < 0:
        raise _outside(function)
    return value


def _outside(function: str) -> exceptions.KerasHvdError:
    """Why this process is in no job, in the words of the engine."""
    engine = native.engine()
    counters = native.Counters(struct_size=ctypes.sizeof(native.Counters))
    code = engine.khvd_get_counters(ctypes.byref(counters))
    return exceptions.from_code(
        code, f"keras_hvd.{function}(): {engine.khvd_last_error().decode()}"
    )
