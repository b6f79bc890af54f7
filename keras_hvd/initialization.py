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
from keras_hvd.rendezvous import address, mpi, network_interfaces, ranks, secret
from keras_hvd.rendezvous.links import Link
from keras_hvd.rendezvous.proof import Purpose
from keras_hvd.rendezvous.ranks import Meeting
from keras_hvd.runtime import (
    basics,
    installed,
    log,
    mpi_finalization,
    mpi_functions,
    native,
    settings,
    tls,
)
from keras_hvd.runtime.process_sets import ProcessSet, add_process_set, check_for_init

# Held while a thread joins, so a second one finds the job joined.
_joining = threading.RLock()


def init(
    comm: Sequence[int] | Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Joins the job that `khvdrun` or another launcher started; waits for all ranks.

    A process that none of them started is a job of size 1. Further calls do nothing.

    If there are GPUs, TensorFlow uses the one of this local rank, with memory growth;
    earlier settings of the script win. Tensors in host memory come from TensorFlow's
    pool, unless an allocator was already chosen.

    Args:
        comm: None, an empty list, or all started processes in their order, as ranks
            or an mpi4py communicator. For a part of them, use process sets.
        process_sets: sets to add, as with `add_process_set`, the same on all ranks; or
            "dynamic", without effect: sets can always be added later.

    Raises:
        TypeError: `comm` or `process_sets` has another type.
        MismatchError: the ranks gave different process sets.
        KerasHvdError: another rank did not arrive in time, or a system call failed.
        ForkedError: this process was forked from a rank.
        ValueError: an environment variable of keras_hvd or Horovod is malformed; two
            process sets have the same ranks; a second call has a new process set; or
            `comm` is not all processes in their order.

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
    """Replaces the lock in a forked child, where no thread would release it."""
    global _joining
    _joining = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _join_once(sets: list[ProcessSet]) -> None:
    if basics.is_initialized():
        missing = [each for each in sets if each.process_set_id is None]
        if missing:
            raise ValueError(
                f"init: keras_hvd is already initialized, without {missing[0]}: pass "
                "it to keras_hvd.add_process_set()"
            )
        return
    # What is malformed must not become known when the others rely on this rank.
    given = settings.read()
    timeline = settings.timeline()
    world, meeting = _meet(environment.world())
    options = native.Options(
        struct_size=ctypes.sizeof(native.Options),
        rank=world.rank,
        size=world.size,
        local_rank=world.local_rank,
        local_size=world.local_size,
        cross_rank=world.cross_rank,
        cross_size=world.cross_size,
        job=world.job.encode(),
        **dataclasses.asdict(given),
    )
    options.nccl_library = options.nccl_library or gpu_libraries.packaged_nccl()
    options.nvtx_library = options.nvtx_library or gpu_libraries.packaged_nvtx()
    if meeting is not None:
        _add_meeting(options, meeting)
        if meeting.table.mpi and len(set(meeting.table.hosts())) > 1:
            _add_mpi(options, str(world.mpi))
        _explain_missing_memory(meeting)
        _give_nccl_the_network(meeting, world.rank)
    basics.check(native.engine().khvd_init(ctypes.byref(options)))
    basics.note_job(world.job)
    # At once: the other ranks continue, and earlier submissions are not recorded.
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


def _meet(world: environment.World) -> tuple[environment.World, Meeting | None]:
    """Meets the other ranks, if they may be on other hosts.

    Returns what is then known of this process' place, and the ranks and links, or None
    if all ranks are on this host in any case.
    """
    if world.rendezvous is None and world.mpi is None:
        return world, None
    basics.require_not_forked("init")
    place = ranks.Place(
        rank=world.rank,
        size=world.size,
        local_rank=world.local_rank,
        local_size=world.local_size,
        job=world.job,
        host_key=world.host_key,
        interfaces=settings.network_interfaces(),
        data_connections=settings.data_connections(),
        mpi=_wants_mpi(world),
    )
    timeout, begin_tls = settings.init_timeout(), tls.chosen(os.environ)
    # Last: what is malformed must not become known when the others rely on this rank.
    arranged = _arrangement(world, place)
    meeting = ranks.meet(place, arranged, _wanted_links, timeout, begin_tls)
    world = dataclasses.replace(world, job=meeting.table.job)
    if world.cross_rank is None:
        cross_rank, cross_size = meeting.table.cross(world.rank)
        world = dataclasses.replace(world, cross_rank=cross_rank, cross_size=cross_size)
    return world, meeting


def _wants_mpi(world: environment.World) -> bool:
    """Whether MPI is to carry tensors between hosts: where it has started the ranks."""
    asked = settings.cpu_operations()
    if asked == "mpi" and settings.tls():
        raise ValueError(
            "KERAS_HVD_TLS=1 encrypts what passes between hosts, and "
            "KERAS_HVD_CPU_OPERATIONS=mpi has MPI carry tensors, which nothing "
            "encrypts: leave out one of them"
        )
    started = world.mpi is not None and world.rendezvous is None
    if asked == "mpi" and not started:
        raise ValueError(
            "KERAS_HVD_CPU_OPERATIONS=mpi has MPI carry tensors between hosts, and "
            "these ranks do not meet by MPI: start them with mpirun, without "
            "KERAS_HVD_RENDEZVOUS, or leave it out"
        )
    return started and asked != "tcp" and not settings.tls()


def _arrangement(world: environment.World, place: ranks.Place) -> ranks.Arrangement:
    """Where the ranks meet: as the user has said, or as they agree by MPI."""
    if world.rendezvous is not None:
        return ranks.Arrangement(
            [address.parse(world.rendezvous)], secret.take(os.environ)
        )
    communicator = mpi.communicator(str(world.mpi), world.rank, world.size)
    if place.mpi:
        mpi.require_threads()
    mpi_finalization.avoid_after_failure(str(world.mpi))
    if world.rank == 0:
        return mpi.invite(communicator, place.interfaces)
    return mpi.accept(communicator, settings.init_timeout())


def _wanted_links(rank: int, hosts: Sequence[int]) -> list[Link]:
    return [Link(peer, Purpose(kind)) for peer, kind in native.links(rank, hosts)]


def _add_meeting(options: native.Options, meeting: Meeting) -> None:
    """Tells the engine of the other ranks, and gives it the links."""
    size = len(meeting.table.ranks)
    options.hosts = (ctypes.c_int32 * size)(*meeting.table.hosts())
    names = [one.host_name.encode() for one in meeting.table.ranks]
    options.host_names = (ctypes.c_char_p * size)(*names)
    pids = [one.pid for one in meeting.table.ranks]
    options.pids = (ctypes.c_int32 * size)(*pids)
    # Both ends list the connections of a link in the same order.
    links = sorted(meeting.links.items(), key=lambda item: item[0].number)
    options.link_count = len(links)
    options.links = (native.Link * len(links))(
        # khvd_init takes them over, whatever it returns.
        *(
            native.Link(
                link.peer,
                link.purpose,
                stream.socket.detach(),
                None if stream.tls is None else stream.tls.detach(),
            )
            for link, stream in links
        )
    )


def _add_mpi(options: native.Options, family: str) -> None:
    """Has MPI carry tensors between hosts."""
    world = mpi.communicator(family, options.rank, options.size)
    communicator = mpi.duplicate(world, settings.init_timeout())
    options.mpi = ctypes.pointer(mpi_functions.take(communicator))


def _explain_missing_memory(meeting: Meeting) -> None:
    reasons = meeting.without_memory
    if not reasons:
        return
    others = f", and {len(reasons) - 1} more ranks" if len(reasons) > 1 else ""
    log.write(
        "warning",
        "ranks that seem to be on one machine cannot share memory, and use the "
        f"network instead: {reasons[0]}{others}. Copies of a virtual machine seem to "
        "be one, and a container may keep its processes from those of others. A "
        "KERAS_HVD_HOST_KEY of its own for each says that this is as it should be",
    )


def _give_nccl_the_network(meeting: Meeting, rank: int) -> None:
    """Between hosts NCCL uses the same network, unless the user has named another."""
    if len(set(meeting.table.hosts())) == 1:
        return
    name = network_interfaces.name_of(meeting.table.ranks[rank].addresses[0].host)
    if name is not None:
        # Without "=", NCCL takes it for the beginning of a name.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _check_is_world(comm: Any, world: environment.World) -> None:
    """Raises an error unless `comm` is all processes, in their order."""
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
            f"of {world.size}. A job includes all processes: leave out comm, "
            "and use process_sets for a part of them"
        )


# The functions below run once in a process, however often it joins.


@functools.cache
def _spare_what_is_imported() -> None:
    """Excludes all imported objects from Python's garbage collector.

    At exit Python scans all objects several times, which takes more than a second after
    importing TensorFlow. Many ranks on few cores would end long after their job failed.
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
            "one that you do not want, or remove its folder from sys.path",
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
