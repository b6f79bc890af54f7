"""Joining the job that was started."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import gc
import hashlib
import itertools
import operator
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from keras_hvd import exceptions
from keras_hvd.backends.current import process
from keras_hvd.job import (
    arrival,
    basics,
    cores,
    gpu_libraries,
    installed,
    log,
    mpi_functions,
    native,
    said_once,
    script_end,
    settings,
    uncaught,
)
from keras_hvd.job.process_sets import ProcessSet, add_process_set, check_for_init
from keras_hvd.recording import capacity, files
from keras_hvd.world import environment, renewal, tls
from keras_hvd.world.launchers.launcher import WayOfMpi
from keras_hvd.world.launchers.variables import job_name
from keras_hvd.world.rendezvous import (
    address,
    joined,
    network_interfaces,
    part,
    ranks,
    secret,
)
from keras_hvd.world.rendezvous.links import Link
from keras_hvd.world.rendezvous.listener import take_early
from keras_hvd.world.rendezvous.proof import Purpose
from keras_hvd.world.rendezvous.ranks import Meeting
from keras_hvd.world.unread_launchers import Sign

# The fields of a process' place in its job, for the engine.
_PLACE = "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"

# The number of times that this process has joined with a list.
_numbers = itertools.count()

# This process' place, according to its launcher, when it last joined.
_launched: environment.World

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
        comm: the processes of this job, as a list of the ranks that they were started
            with, or as an mpi4py communicator; None or an empty list: all. The order is
            that of their ranks in the job. All processes of a part give the same list.
            Parts do not know of each other; process sets are parts of one job.
        process_sets: sets to add, as with `add_process_set`, the same on all ranks; or
            "dynamic", without effect: sets can always be added later.

    Raises:
        TypeError: `comm` or `process_sets` has another type.
        MismatchError: the ranks gave different process sets.
        KerasHvdError: another rank did not arrive in time, or a system call failed.
        ForkedError: this process was forked from a rank.
        ValueError: an environment variable of keras_hvd or Horovod is malformed; two
            process sets have the same ranks; a second call has a new process set; or
            `comm` repeats a rank, lacks this one, or has one that was not started.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.rank(), keras_hvd.size()
    (0, 1)
    """
    global _launched
    sets = check_for_init(process_sets)
    with _joining:
        if basics.is_initialized():
            _members(comm, _launched)
            _require_known(sets)
        else:
            renewal.learn_where_to_meet()
            _launched = environment.world()
            members = _members(comm, _launched)
            _await_others()
            is_alone = _launched.size == 1
            with contextlib.nullcontext() if is_alone else uncaught.joining():
                _join(_launched, members, sets)


def rejoin(cancel: int) -> None:
    """Joins another job, whose place the environment tells.

    A wait for the others ends, with a KerasHvdError, once there is something to read at
    the descriptor `cancel`.
    """
    global _launched
    with _joining:
        _launched = environment.world()
        _join(_launched, None, [], cancel)


def _await_others() -> None:
    """Of a job that ranks may join later, which are then alone at first."""
    told = renewal.of(os.environ)
    if told is None or not told.gains:
        return
    to_come = arrival.Place(told.rank_to_come, told.rank_to_come + 1, told.slot)
    arrival.await_arrival(to_come if told.is_new else None)


def _renew_lock() -> None:
    """Replaces the lock in a forked child, where no thread would release it."""
    global _joining
    _joining = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _require_known(sets: list[ProcessSet]) -> None:
    missing = [each for each in sets if each.process_set_id is None]
    if missing:
        raise ValueError(
            f"init: keras_hvd is already initialized, without {missing[0]}: pass it to "
            "keras_hvd.add_process_set()"
        )


def _join(
    launched: environment.World,
    members: list[int] | None,
    sets: list[ProcessSet],
    cancel: int | None = None,
) -> None:
    # A malformed setting must not become known when the others rely on this rank.
    given, timeline = settings.read(), settings.timeline()
    shows_all, later = settings.all_output(), renewal.of(os.environ)
    if later is not None:
        given, timeline = _files_of_generation(given, timeline, later)
    sign = _check_size(launched, members)
    world, meeting = _meet(launched, members, cancel)
    if launched.local_size == 0:
        local_rank, local_size = world.local_rank, world.local_size
        launched = dataclasses.replace(
            launched, local_rank=local_rank, local_size=local_size
        )
    if world.size < launched.size and members is not None:
        given, timeline = _files_of_part(given, timeline, members[0])
    _start_engine(world, meeting, given, cancel)
    joined.tell(launched.job, launched.rank - launched.local_rank)
    with _leaving_on_error():
        _start_recording(
            launched, world, meeting, timeline, is_again=cancel is not None
        )
    _warn(world, sign)
    comes_later = later is not None and later.is_new
    # The ranks that one comes to have said the same.
    said_once.begin(world.rank or int(comes_later), shows_all)
    _prepare_end(world)
    if os.environ.get(cores.SHARED) == "1":
        cores.share(launched.local_size)
    # Nor does it take the first rank's GPU, while it is alone.
    local_rank = later.slot if later and comes_later else launched.local_rank
    process.prepare(world.rank, launched.size, local_rank, launched.local_size)
    with _leaving_on_error():
        for each in sets:
            add_process_set(each)


def _check_size(launched: environment.World, members: list[int] | None) -> Sign | None:
    # Members of a part tell their number themselves. So does a process that goes on in
    # another job, perhaps with fewer, at a place of its own.
    says_so = basics.epoch().number > 0 and "KERAS_HVD_SIZE" in os.environ
    if members is not None or says_so:
        return None
    return environment.check_size(launched.size)


def _meet(
    launched: environment.World, members: list[int] | None, cancel: int | None
) -> tuple[environment.World, Meeting | None]:
    """Meets the other members, if they may be on other hosts.

    Returns this process' place as then known, and the ranks and links, or None if all
    ranks are on this host in any case.
    """
    everyone = [*range(launched.size)]
    is_whole = members in (None, everyone)
    world = launched if members is None or is_whole else _part(launched, members)
    if world.rendezvous is None and world.way is None:
        if members is not None:
            number, timeout = next(_numbers), settings.init_timeout()
            part.agree(launched.job, launched.rank, members, number, timeout)
        return world, None
    basics.require_not_forked("init")
    knows_place = world.local_size > 0
    place = (world.local_rank, world.local_size) if knows_place else (0, 1)
    identity = ranks.RankIdentity(
        *(world.rank, world.size, *place, world.job),
        host_key=world.host_key,
        interfaces=settings.network_interfaces(),
        data_connections=settings.data_connections(),
        mpi=_wants_mpi(world, is_whole),
        recorded=is_whole and bool(settings.report()),
    )
    timeout, begin_tls = settings.init_timeout(), tls.chosen(os.environ)
    # Last: a malformed value must not become known when the others rely on this rank.
    if launched.way is None:
        where = address.parse(str(launched.rendezvous))
        early = take_early(where) if world.rank == 0 else ()
        point = ranks.MeetingPoint([where], secret.take(os.environ), early)
    else:
        point = launched.way.arrange(launched, members or everyone, identity, timeout)
    meeting = ranks.meet(identity, point, _wanted_links, timeout, begin_tls, cancel)
    is_placed = is_whole and knows_place
    table = meeting.table if is_placed else meeting.table.of_part()
    own = table.ranks[world.rank]
    world = dataclasses.replace(
        world, job=table.job, local_rank=own.local_rank, local_size=own.local_size
    )
    if world.cross_rank is None:
        cross_rank, cross_size = table.cross(world.rank)
        world = dataclasses.replace(world, cross_rank=cross_rank, cross_size=cross_size)
    return world, meeting


def _part(launched: environment.World, members: list[int]) -> environment.World:
    """This process' place in the job of these members, who may have no way to meet."""
    rank, size = members.index(launched.rank), len(members)
    if launched.way is not None and launched.way.parts_meet:
        # The places on hosts follow when the members have met.
        own = environment.World(rank, size, 0, 1, None, None, "")
        return dataclasses.replace(own, host_key=launched.host_key, way=launched.way)
    if launched.rendezvous is not None or launched.way is not None:
        raise exceptions.KerasHvdError(
            f"init: comm={members} is a part of {launched.size} processes that may be "
            "on several hosts, and the members of a part find each other only under "
            "mpirun: start the job with mpirun, or leave out comm and use process sets"
        )
    digest = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
    return environment.World(
        *(rank, size, rank, size, 0, 1), job_name(f"{launched.job}/{digest}")
    )


def _wants_mpi(world: environment.World, is_whole: bool) -> bool:
    """Whether MPI is to carry tensors between hosts."""
    if settings.cpu_operations() != "mpi":
        return False
    if settings.tls():
        raise ValueError(
            "KERAS_HVD_TLS=1 encrypts what passes between hosts, and "
            "KERAS_HVD_CPU_OPERATIONS=mpi has MPI carry tensors, which nothing "
            "encrypts: leave out one of them"
        )
    if not isinstance(world.way, WayOfMpi) or not is_whole:
        raise ValueError(
            "KERAS_HVD_CPU_OPERATIONS=mpi has MPI carry tensors between hosts, which "
            "takes ranks that mpirun has started and that meet by MPI, all of them: "
            "leave it out, or start them with mpirun, without KERAS_HVD_RENDEZVOUS and "
            "without a comm"
        )
    return True


def _wanted_links(rank: int, hosts: Sequence[int]) -> list[Link]:
    return [Link(peer, Purpose(kind)) for peer, kind in native.links(rank, hosts)]


def _start_engine(
    world: environment.World,
    meeting: Meeting | None,
    given: settings.Settings,
    cancel: int | None,
) -> None:
    """Makes the engine join, which waits for the ranks of this host."""
    options = native.Options(
        job=world.job.encode(),
        **{name: getattr(world, name) for name in _PLACE},
        **dataclasses.asdict(given),
    )
    options.nccl_library = options.nccl_library or gpu_libraries.packaged_nccl()
    options.nvtx_library = options.nvtx_library or gpu_libraries.packaged_nvtx()
    uses_mpi = False
    if meeting is not None:
        _add_meeting(options, meeting)
        uses_mpi = meeting.table.mpi and len(set(meeting.table.hosts())) > 1
        if uses_mpi:
            assert isinstance(world.way, WayOfMpi)
            communicator = world.way.communicator(world, settings.init_timeout())
            options.mpi = ctypes.pointer(mpi_functions.take(communicator))
        _explain_missing_memory(meeting)
        _give_nccl_the_network(meeting, world.rank)
    if cancel is not None:
        options.cancel_fd = ctypes.pointer(ctypes.c_int32(cancel))
    if native.engine().khvd_failure():
        # Before the engine forgets it.
        process.note_failure()
    basics.check(native.engine().khvd_init(ctypes.byref(options)))
    basics.begin_epoch(world.job, uses_mpi)


def _add_meeting(options: native.Options, meeting: Meeting) -> None:
    """Passes the other ranks and the links to the engine."""
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
    """Makes NCCL use the same network, unless the user has named another."""
    if len(set(meeting.table.hosts())) == 1:
        return
    name = network_interfaces.name_of(meeting.table.ranks[rank].addresses[0].host)
    if name is not None:
        # Without "=", NCCL takes it for the beginning of a name.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _members(comm: Any, world: environment.World) -> list[int] | None:
    """The processes of this job, by the ranks they were started with; None: all."""
    if comm is None:
        return None
    if hasattr(comm, "Get_rank"):
        return _members_of_communicator(comm, world)
    try:
        members = [operator.index(rank) for rank in comm]
    except TypeError:
        raise TypeError(
            "init: comm must be a list of ranks, an mpi4py communicator or None, "
            f"got {comm!r}"
        ) from None
    if not members:
        return None
    own = f"this process was started as rank {world.rank} of {world.size}"
    strange = [rank for rank in members if not 0 <= rank < world.size]
    if strange:
        raise ValueError(f"init: comm={members} has rank {strange[0]}, but {own}")
    repeated = [rank for rank in members if members.count(rank) > 1]
    if repeated:
        raise ValueError(f"init: comm={members} has rank {repeated[0]} twice")
    if world.rank not in members:
        raise ValueError(
            f"init: comm={members} lacks this process: {own}. Only the members of a "
            "part call init with it"
        )
    return members


def _members_of_communicator(comm: Any, world: environment.World) -> list[int]:
    from mpi4py import MPI

    all_of_mpi = MPI.COMM_WORLD
    if (all_of_mpi.rank, all_of_mpi.size) != (world.rank, world.size):
        raise ValueError(
            f"init: comm is a communicator of mpi4py, for which this process is rank "
            f"{all_of_mpi.rank} of {all_of_mpi.size}, but it was started as rank "
            f"{world.rank} of {world.size}: start the script with the mpirun of that "
            "MPI, or give a list of ranks"
        )
    group = comm.Get_group()
    members = MPI.Group.Translate_ranks(group, None, all_of_mpi.Get_group())
    if MPI.UNDEFINED in members:
        raise ValueError("init: comm has processes that are not in MPI's COMM_WORLD")
    return [*members]


def _files_of_part(
    given: settings.Settings, timeline: settings.Timeline, first: int
) -> tuple[settings.Settings, settings.Timeline]:
    """Gives the files of this part names that no other part has."""

    def of_part(path: str) -> str:
        stem, extension = os.path.splitext(path)
        return path and f"{stem}.rank-{first}{extension}"

    log_path = os.fsencode(of_part(os.fsdecode(given.autotune_log)))
    return (
        dataclasses.replace(given, autotune_log=log_path),
        dataclasses.replace(timeline, path=of_part(timeline.path)),
    )


def _files_of_generation(
    given: settings.Settings, timeline: settings.Timeline, told: renewal.Renewal
) -> tuple[settings.Settings, settings.Timeline]:
    """Gives a job that goes on files of its own, and none to a rank that is new.

    What autotuning has found is for the next job too.
    """
    if told.is_new:
        given = dataclasses.replace(given, autotune_log=b"")
        return given, dataclasses.replace(timeline, path="")
    path = timeline.path and files.of_generation(timeline.path, told.generation)
    return given, dataclasses.replace(timeline, path=path)


@contextlib.contextmanager
def _leaving_on_error() -> Iterator[None]:
    try:
        yield
    except BaseException:
        basics.shutdown()
        raise


def _start_recording(
    launched: environment.World,
    world: environment.World,
    meeting: Meeting | None,
    timeline: settings.Timeline,
    is_again: bool,
) -> None:
    """Begins this rank's recording and the timeline, as far as they are wanted.

    Where the rank goes on in another job, they are not worth that one's end.
    """
    # A part of the processes has no recording: khvdrun has made one folder. Nor has a
    # rank that is new: it is in no job so far.
    is_whole = world.size == launched.size and not arrival.is_new()
    folder = settings.report() if is_whole else ""
    is_recorded = bool(folder) if meeting is None else meeting.table.recorded
    measured = None
    if is_recorded and world.size > 1 and not is_again:
        measured = capacity.measure()
    if folder and not files.is_of_this_host(folder):
        # Ranks of all hosts get it, from mpirun or where they go on.
        folder = ""
    # At once: the other ranks continue, and earlier submissions are not recorded.
    if folder:
        path = os.fsencode(os.path.join(folder, files.TIMES))
        with _recording_or_not("recording", is_again):
            basics.check(native.engine().khvd_start_recording(path))
    if timeline.path:
        path, marks = os.fsencode(timeline.path), timeline.mark_cycles
        with _recording_or_not("timeline", is_again):
            basics.check(native.engine().khvd_start_timeline(path, marks))
    if folder:
        # It takes NumPy.
        from keras_hvd.recording import recorder

        ranks_of_job = [] if meeting is None else meeting.table.places()
        place = world.rank, world.size, launched.local_rank
        with _recording_or_not("recording", is_again):
            recorder.start(folder, *place, ranks_of_job, measured)


@contextlib.contextmanager
def _recording_or_not(what: str, is_again: bool) -> Iterator[None]:
    """Warns and goes on if there is no room for a recording or a timeline.

    Where the rank goes on in another job, it does so after any error.
    """
    try:
        yield
    except (exceptions.KerasHvdError, OSError, ValueError) as error:
        if not is_again and not files.is_full(error):
            raise
        _warn_once(what, f"this job has no {what}, or a part of one: {error}")


def _warn(world: environment.World, sign: Sign | None) -> None:
    """Warns the user about this job and this installation."""
    if world.rank == 0:
        _warn_once("settings", settings.without_effect())
    if sign is not None and sign.is_first:
        _warn_once("sign", str(sign))
    # Looking for them takes a while.
    if world.rank == 0 and "copies" not in _warned:
        others = " and ".join(map(str, installed.other_copies()))
        text = (
            f"this is the keras_hvd in {installed.PACKAGE}, and there is another copy "
            f"in {others}, which is not used: uninstall the one that you do not want, "
            "or remove its folder from sys.path"
        )
        _warn_once("copies", text if others else "")


_warned: set[str] = set()


def _warn_once(what: str, text: str) -> None:
    """Warns once in a process, however often it joins."""
    if text and what not in _warned:
        log.write("warning", text)
    _warned.add(what)


def _prepare_end(world: environment.World) -> None:
    """Makes this process leave the job at its end, and end soon."""
    atexit.unregister(basics.shutdown)
    atexit.register(basics.shutdown)
    script_end.watch()
    if world.size > 1:
        _spare_what_is_imported()


@functools.cache
def _spare_what_is_imported() -> None:
    """Excludes all imported objects from Python's garbage collector.

    At exit Python scans all objects several times, which takes more than a second after
    importing TensorFlow. Many ranks on few cores would end long after their job failed.
    """
    gc.freeze()
