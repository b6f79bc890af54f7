"""The interface of launchers: a process' place, and its way to meet the others."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from keras_hvd.exceptions import KerasHvdError
from keras_hvd.world.rendezvous.ranks import MeetingPoint, RankIdentity


class LaunchEnvironmentError(KerasHvdError):
    """The launcher's variables are malformed, contradictory or unsupported."""


@dataclass(frozen=True)
class World:
    """This process' place in its job.

    Args:
        rank: Number of this process in the job, from 0.
        size: Number of processes in the job.
        local_rank: Number of this process among those of the job on this host, from 0.
        local_size: Number of processes of the job on this host; 0 until the ranks have
            met, if the launcher does not tell it. `local_rank` counts from then on too.
        cross_rank: Number of this host among those with a process of this local rank,
            from 0; None until the ranks have met.
        cross_size: Number of hosts with a process of this local rank; None until the
            ranks have met.
        job: A name that no other running job on this host has; "" if rank 0 makes up
            one when the ranks meet.
        rendezvous: HOST:PORT where the ranks meet; None if all are on one host.
        host_key: Sets this process' host apart, if the user gives one.
        way: How the ranks of several hosts meet, if their launcher helps.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int | None
    cross_size: int | None
    job: str
    rendezvous: str | None = None
    host_key: str | None = None
    way: Way | None = None


class Way(abc.ABC):
    """The way by which a launcher's ranks on several hosts learn where to meet."""

    parts_meet: ClassVar[bool] = False
    """Whether the members of a part of the ranks find each other."""

    @abc.abstractmethod
    def arrange(
        self,
        world: World,
        members: Sequence[int],
        identity: RankIdentity,
        timeout: float,
    ) -> MeetingPoint:
        """Arranges where these of the ranks meet. Raises RendezvousError.

        All but the first of them wait until it has told them. `world` is of all ranks,
        `identity` of the members.
        """


class WayOfMpi(Way):
    """A way whose MPI can carry tensors between hosts."""

    @abc.abstractmethod
    def communicator(self, world: World, timeout: float) -> Any:
        """The engine's own communicator. All ranks call it. Raises RendezvousError."""


class Launcher(Protocol):
    """The functions of a launcher. Modules and objects have them."""

    def is_here(self, variables: Mapping[str, str]) -> bool:
        """Whether it has started the process with these variables."""

    def world(self, variables: Mapping[str, str]) -> World:
        """The place that it has given to that process.

        Raises LaunchEnvironmentError.
        """
