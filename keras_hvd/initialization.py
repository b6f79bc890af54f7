"""Joining the job that was started."""

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
from typing import Any

from keras_hvd import allocator, environment, exceptions
from keras_hvd.gpu import gpu_libraries, gpu_pinning
from keras_hvd.runtime import basics, installed, log, native, settings
from keras_hvd.runtime.process_sets import ProcessSet, add_process_set, check_for_init

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
    sets = check_for_init(process_sets)
    with _joining:
        _join_once(sets)


def _renew_lock() -> None:
    """In a forked child nobody is left who would let go of it."""
    global _joining
    _joining = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _join_once(sets: list[ProcessSet]) -> None:
    if basics.is_initialized():
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
    basics.check(native.engine().khvd_init(ctypes.byref(options)))
    basics.note_job(world.job)
    # At once: the other ranks go on, and what they submit before is not in it.
    if timeline.path:
        _start_timeline(timeline)
    if world.rank == 0:
        _explain_settings()
    atexit.unregister(basics.shutdown)
    atexit.register(basics.shutdown)
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


def _add(sets: list[ProcessSet]) -> None:
    try:
        for each in sets:
            add_process_set(each)
    except BaseException:
        basics.shutdown()
        raise


def _start_timeline(timeline: settings.Timeline) -> None:
    path = os.fsencode(timeline.path)
    try:
        basics.check(native.engine().khvd_start_timeline(path, timeline.mark_cycles))
    except exceptions.KerasHvdError:
        basics.shutdown()
        raise
