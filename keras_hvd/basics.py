"""Joining and leaving the job, and this process' place in it."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import gc
import operator
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_hvd import (
    allocator,
    environment,
    exceptions,
    gpu_libraries,
    gpu_pinning,
    installed,
    log,
    native,
    settings,
)

if TYPE_CHECKING:
    from keras_hvd.process_sets import ProcessSet

_jobs_joined = 0
_job = ""

# Held while a thread joins, so that a second one finds it done.
_joining = threading.RLock()


def init(
    comm: Sequence[int] | Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Joins the job that `khvdrun`, `mpirun` or `srun` started; returns with all ranks.

    A process that none of them started is a job of its own, of size 1. Calling it
    again does nothing.

    Where there are GPUs, TensorFlow is told to use one: that of this local rank, its
    memory as it is needed. What the script has told it before counts. Tensors in host
    memory come from TensorFlow's pool, unless an allocator was chosen already.

    Args:
        comm: the ranks of the job, or an mpi4py communicator. This version takes all
            processes that were started, in their order, which None and an empty list
            mean as well; process sets are for parts of them.
        process_sets: sets to add at once, as `add_process_set` does, the same on all
            ranks; or "dynamic", which changes nothing: sets can always be added later.

    Raises:
        TypeError: `comm` or `process_sets` is something else.
        MismatchError: the ranks gave different process sets.
        KerasHvdError: another rank did not arrive in time, or the system refused
            something; the text says what.
        ForkedError: this process was forked from a rank.
        ValueError: an environment variable of keras_hvd or Horovod is malformed; the
            text names it and its value. Or two process sets have the same ranks, or
            one is given to a second call that the first one was not. Or `comm` is not
            all processes in their order.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.rank(), keras_hvd.size()
    (0, 1)
    """
    if comm is not None:
        _check_is_world(comm, environment.world())
    sets = _sets_to_add(process_sets)
    with _joining:
        _join_once(sets)


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


def _renew_lock() -> None:
    """In a forked child nobody is left who would let go of it."""
    global _joining
    _joining = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _join_once(sets: list[ProcessSet]) -> None:
    global _jobs_joined, _job
    if is_initialized():
        missing = [each for each in sets if each.process_set_id is None]
        if missing:
            raise ValueError(
                f"init: keras_hvd is initialized already, without {missing[0]}: give "
                "it to keras_hvd.add_process_set()"
            )
        return
    world = environment.world()
    options = native.Options(
        struct_size=ctypes.sizeof(native.Options),
        rank=world.rank,
        size=world.size,
        local_rank=world.local_rank,
        local_size=world.local_size,
        cross_rank=world.cross_rank,
        cross_size=world.cross_size,
        job=world.job.encode(),
        **dataclasses.asdict(settings.read()),
    )
    options.nccl_library = options.nccl_library or gpu_libraries.packaged_nccl()
    options.nvtx_library = options.nvtx_library or gpu_libraries.packaged_nvtx()
    timeline = settings.timeline()
    check(native.engine().khvd_init(ctypes.byref(options)))
    _jobs_joined += 1
    _job = f"{world.job}, {_jobs_joined}"
    # At once: the other ranks go on, and what they submit before is not in it.
    if timeline.path:
        _start_timeline(timeline)
    if world.rank == 0:
        _explain_settings()
    atexit.unregister(shutdown)
    atexit.register(shutdown)
    if world.rank == 0:
        _warn_of_other_copies()
    if world.size > 1:
        _spare_what_is_imported()
    allocator.use(world.rank)
    gpu_pinning.pin(world)
    _add(sets)


def _check_is_world(comm: Any, world: environment.World) -> None:
    """Raises unless ranks or a communicator are all processes, in their order."""
    if hasattr(comm, "Get_rank"):
        rank, size = comm.Get_rank(), comm.Get_size()
        is_world = (rank, size) == (world.rank, world.size)
        given = f"a communicator in which this is rank {rank} of {size}"
    else:
        try:
            ranks = [operator.index(rank) for rank in comm]
        except TypeError:
            raise TypeError(
                "init: comm must be a list of ranks, an mpi4py communicator or None, "
                f"got {comm!r}"
            ) from None
        is_world = ranks in ([], [*range(world.size)])
        given = f"the ranks {ranks}"
    if not is_world:
        raise ValueError(
            f"init: comm is {given}, but this process was started as rank {world.rank} "
            f"of {world.size}. A job is all of the processes: leave comm out, "
            "and give parts of them as process_sets"
        )


# The functions below do something once in a process, however often it joins.


@functools.cache
def _spare_what_is_imported() -> None:
    """Has Python's garbage collector pass over all that the imports have made.

    When Python exits it looks several times through all objects, which takes a rank
    that has imported TensorFlow more than a second: where many ranks share few cores
    they would end long after the failure that ended their job. What the script makes
    from now on is finalized as ever.
    """
    gc.freeze()


@functools.cache
def _explain_settings() -> None:
    text = settings.without_effect()
    if text:
        log.write("warning", text)


@functools.cache
def _warn_of_other_copies() -> None:
    others = installed.other_copies()
    if others:
        log.write(
            "warning",
            f"this is the keras_hvd in {installed.PACKAGE}, and there is another copy "
            f"in {' and '.join(map(str, others))}, which is not used: uninstall the "
            "one that you do not want, or take its folder off sys.path",
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


def _sets_to_add(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    if process_sets is None:
        return []
    from keras_hvd.process_sets import check_for_init

    return check_for_init(process_sets)


def _add(sets: list[ProcessSet]) -> None:
    if not sets:
        return
    from keras_hvd.process_sets import add_process_set

    try:
        for each in sets:
            add_process_set(each)
    except BaseException:
        shutdown()
        raise


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


def _start_timeline(timeline: settings.Timeline) -> None:
    path = os.fsencode(timeline.path)
    try:
        check(native.engine().khvd_start_timeline(path, timeline.mark_cycles))
    except exceptions.KerasHvdError:
        shutdown()
        raise
