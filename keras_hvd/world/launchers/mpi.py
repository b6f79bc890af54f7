"""The way by which `mpirun`'s ranks on several hosts learn where to meet.

Rank 0 sends the others a fresh secret and its addresses, once, by mpi4py. It imports
mpi4py, which initializes MPI, only then.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from keras_hvd.exceptions import RendezvousError
from keras_hvd.job import mpi_finalization
from keras_hvd.world.launchers.launcher import WayOfMpi, World
from keras_hvd.world.rendezvous import event_loop, network_interfaces, part
from keras_hvd.world.rendezvous.address import Address
from keras_hvd.world.rendezvous.listener import listen_at_free_ports
from keras_hvd.world.rendezvous.ranks import MeetingPoint, RankIdentity
from keras_hvd.world.rendezvous.secret import Secret

_TAG = 29400  # MPI promises tags up to 32767
_MOST_BYTES = 1 << 18
_SECRET_BYTES = 32
# MPI has nothing to sleep on, so a waiting rank looks ever more rarely.
_FIRST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.02

# The MPIs by mpi4py's names, and their libraries.
_FAMILIES = {
    "Open MPI": ("openmpi", "libmpi.so.40"),
    "MPICH": ("mpich", "libmpi.so.12"),
}
_ABI = "MPI4PY_MPIABI"


# MPI may still use the memory of requests that a start left unfinished.
_in_flight: list[Any] = []


@dataclass(frozen=True)
class ByMpi(WayOfMpi):
    """Rank 0 tells the others by MPI."""

    family: str
    """Open MPI or MPICH."""

    parts_meet: ClassVar[bool] = True

    def communicator(self, world: World, timeout: float) -> Any:
        return duplicate(communicator(self.family, world.rank, world.size), timeout)

    def arrange(
        self,
        world: World,
        members: Sequence[int],
        identity: RankIdentity,
        timeout: float,
    ) -> MeetingPoint:
        ranks = communicator(self.family, world.rank, world.size)
        if identity.mpi:
            require_threads()
        mpi_finalization.avoid_after_failure(self.family)
        if world.rank == members[0]:
            return invite(ranks, members, identity.interfaces)
        return accept(ranks, members, timeout)


def communicator(family: str, rank: int, size: int) -> Any:
    """mpi4py's communicator of all ranks that `mpirun` has started.

    Raises RendezvousError if there is none, or if it is for other processes.
    """
    try:
        MPI = _mpi4py(family)
    except (ImportError, RuntimeError) as error:
        raise RendezvousError(
            f"the mpirun of {family} started the {size} ranks of this job on several "
            "hosts, and mpi4py, by which they learn where to meet, cannot be used "
            f"({_line(error)}): install it (pip install mpi4py), or set "
            "KERAS_HVD_RENDEZVOUS to HOST:PORT on rank 0's host, and "
            "KERAS_HVD_SECRET_FILE, for all ranks"
        ) from None
    if MPI.Is_finalized():
        raise RendezvousError(
            "keras_hvd.init() needs MPI, which this script has finalized: call "
            "MPI.Finalize() later, or leave it out"
        )
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, size):
        raise RendezvousError(
            f"the mpirun of {family} started this process as rank {rank} of {size}, "
            f"but for mpi4py, which uses {_version(MPI)}, it is rank {world.rank} of "
            f"{world.size}: start the job with that MPI's own mpirun, or have mpi4py "
            f"use {family} ({_ABI}={_FAMILIES[family][0]})"
        )
    return world


def require_threads() -> None:
    """Raises RendezvousError unless the engine's threads may call MPI."""
    from mpi4py import MPI

    names = {
        MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
        MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    }
    level = names.get(MPI.Query_thread())
    if level is not None:
        raise RendezvousError(
            f"MPI was initialized with {level}, and keras_hvd, whose tensors MPI "
            "carries between hosts, calls it from several threads: set "
            'mpi4py.rc.thread_level = "multiple" (or "serialized", if the script calls '
            "MPI at no time between keras_hvd.init() and shutdown()) before the "
            "script imports mpi4py.MPI, or have TCP carry tensors (without "
            "KERAS_HVD_CPU_OPERATIONS=mpi)"
        )


def duplicate(world: Any, timeout: float) -> Any:
    """A communicator for the engine alone. All ranks call this.

    Raises RendezvousError if others do not.
    """
    communicator, request = world.Idup()
    _in_flight.append((communicator, request))
    _wait(
        request,
        timeout,
        f"rank {world.rank} waited {timeout:g} s for the others to make a communicator "
        "for tensors, after all had met: look at their own errors, and let no thread "
        "of the script use MPI.COMM_WORLD for collectives during keras_hvd.init()",
    )
    # So that the engine gets the errors.
    from mpi4py import MPI

    communicator.Set_errhandler(MPI.ERRORS_RETURN)
    return communicator


def _wait(request: Any, timeout: float, problem: str) -> None:
    deadline = time.monotonic() + timeout
    pauses = _pauses()
    while not request.Test():
        if time.monotonic() > deadline:
            raise RendezvousError(problem)
        time.sleep(next(pauses))


def _mpi4py(family: str) -> Any:
    """The module MPI, for this family."""
    import mpi4py

    package = Path(mpi4py.__path__[0])
    if "mpi4py.MPI" not in sys.modules and any(package.glob("MPI.*mpi*.so")):
        _choose(family)
    from mpi4py import MPI

    return MPI


def _choose(family: str) -> None:
    """Makes an mpi4py that is built for several families use this one."""
    abi, library = _FAMILIES[family]
    chosen = os.environ.get(_ABI)
    others = [each for each, (its, _) in _FAMILIES.items() if its == chosen != abi]
    if others:
        # That MPI would end this process without an explanation.
        raise RendezvousError(
            f"the mpirun of {family} started this process, and mpi4py is to use "
            f"{others[0]} ({_ABI}={chosen}): start the job with the mpirun of "
            f"{others[0]}, or unset {_ABI}"
        )
    if chosen is None and "MPI4PY_LIBMPI" not in os.environ:
        os.environ[_ABI] = abi
        # The place of pip and conda. Elsewhere the system finds it.
        with contextlib.suppress(OSError):
            ctypes.CDLL(os.path.join(sys.prefix, "lib", library))


def invite(
    world: Any, members: Sequence[int], interfaces: Sequence[str]
) -> MeetingPoint:
    """Makes the first of these ranks listen; its arrangement tells the others where.

    Raises RendezvousError.
    """
    listening = listen_at_free_ports(network_interfaces.reachable(interfaces))
    addresses = [Address(*one.getsockname()[:2]) for one in listening]
    secret = secrets.token_bytes(_SECRET_BYTES)
    told = {"addresses": addresses, "secret": secret.hex(), "members": [*members]}
    message = json.dumps(told).encode()
    if len(message) > _MOST_BYTES:
        raise RendezvousError(
            f"rank 0 listens at {len(addresses)} addresses, which are too many: name "
            "one network by KERAS_HVD_NETWORK_INTERFACES"
        )
    return MeetingPoint(
        addresses,
        Secret(secret),
        listening,
        lambda _: _send(world, members[1:], message),
    )


async def _send(world: Any, others: Sequence[int], message: bytes) -> None:
    requests = [world.Isend(message, dest=rank, tag=_TAG) for rank in others]
    _in_flight.append((message, requests))
    pauses = _pauses()
    while not all([one.Test() for one in requests]):
        await event_loop.pause(next(pauses))


def accept(world: Any, members: Sequence[int], timeout: float) -> MeetingPoint:
    """Waits for the message of the first of these ranks. Raises RendezvousError."""
    message = bytearray(_MOST_BYTES)
    request = world.Irecv(message, source=members[0], tag=_TAG)
    _in_flight.append((message, request))
    _wait(
        request,
        timeout,
        f"rank {world.rank} waited {timeout:g} s, and rank {members[0]} did "
        "not come to keras_hvd.init(): start all within --start-timeout "
        "(KERAS_HVD_INIT_TIMEOUT_SECONDS), and look at its own errors",
    )
    content = json.loads(message.rstrip(b"\0"))
    difference = part.mismatch(world.rank, members, members[0], content["members"])
    if difference:
        raise RendezvousError(f"init: {difference}")
    addresses = [Address(host, port) for host, port in content["addresses"]]
    return MeetingPoint(addresses, Secret(bytes.fromhex(content["secret"])))


def _pauses() -> Iterator[float]:
    """The pauses between two looks."""
    seconds = _FIRST_PAUSE_SECONDS
    while True:
        yield seconds
        seconds = min(1.5 * seconds, _LONGEST_PAUSE_SECONDS)


def _version(MPI: Any) -> str:
    """Name and version of mpi4py's MPI."""
    shown = " ".join(MPI.Get_library_version().split("\n")[0].split())
    return shown.split(",")[0].replace("Version: ", "").rstrip("\0")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
