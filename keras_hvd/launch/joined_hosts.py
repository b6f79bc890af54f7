"""The hosts that have joined an elastic job, each by a `khvdrun` of its own.

The first host's `khvdrun` listens for the others. One that joins says how many ranks it
has room for, and then waits to be asked to start them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from keras_hvd.exceptions import RendezvousError
from keras_hvd.launch.hosts import HostSlots
from keras_hvd.launch.other_hosts import LOST, Host, OtherHosts
from keras_hvd.launch.talk import PATIENCE_SECONDS, Talk
from keras_hvd.world.rendezvous import connection, gathering
from keras_hvd.world.rendezvous.connection import ProvenConnection
from keras_hvd.world.rendezvous.gathering import Group
from keras_hvd.world.rendezvous.listener import Listener
from keras_hvd.world.rendezvous.messages import MessageError
from keras_hvd.world.rendezvous.nodes import NotMetError

# The other end may be gone.
_END_SECONDS = 2.0

_MOST_SLOTS = 1 << 16

_TWICE = (
    "a host with --node-rank {} is in the job: give each host a number of its own; if "
    f"this one has come back, try again in {PATIENCE_SECONDS:g} s"
)


@dataclasses.dataclass(eq=False)
class _Host(Host):
    number: int
    slots: int


class JoinedHosts(OtherHosts[_Host]):
    """The hosts that have joined so far.

    Only one process may use it. Others that have inherited its connections keep them
    open.

    Args:
        group: the hosts that are waited for at first.
        slots: those of this host.
    """

    def __init__(self, group: Group, slots: int):
        super().__init__()
        (self.place,) = group.addresses
        """Where this host listens."""
        self.on_change: Callable[[list[HostSlots]], None] = lambda named: None
        """Called when there are other hosts than before."""
        self._own = HostSlots("", slots)
        self._group = group
        proving = connection.proving(group.key, group.tls, group.is_expected)
        self._listener = Listener(self.loop, proving, self._welcome)
        self._listening_at: list[str] = []
        self._times: collections.Counter[int] = collections.Counter()

    def wait_for_all(self, least: int) -> list[HostSlots]:
        """The hosts, once there are as many as are wanted, with so many slots.

        Raises NotMetError.
        """
        deadline = time.monotonic() + self._group.timeout
        self.loop.start(self._open(deadline))
        try:
            are_there = self.loop.wait(lambda: self._are_enough(least), deadline)
        except RendezvousError as error:
            raise NotMetError(str(error)) from None
        if not are_there:
            why = self._missing(least)
            self._tell_all(refused=why)
            raise NotMetError(why)
        return self.named

    def _are_enough(self, least: int) -> bool:
        return len(self.named) >= self._group.count and self._slots >= least

    @property
    def _slots(self) -> int:
        return sum(each.slots or 0 for each in self.named)

    def _missing(self, least: int) -> str:
        """Why it waits no longer."""
        return (
            f"node 0, at {self._group.place}, waited {self._group.timeout:g} s, and "
            f"{len(self.named)} of {self._group.count} hosts are there, with "
            f"{self._slots} of {least} ranks: start khvdrun on the others within "
            "--start-timeout (KERAS_HVD_INIT_TIMEOUT_SECONDS), and look at their own "
            f"errors{gathering.hints(self._group, self._listener, self._listening_at)}"
        )

    @property
    def named(self) -> list[HostSlots]:
        """The hosts that there are, this one first."""
        by_number = sorted(self._hosts.items(), key=lambda each: each[1].number)
        others = [HostSlots(name, each.slots) for name, each in by_number]
        return [self._own, *(each for each in others if each.slots)]

    def end(self, code: int) -> None:
        """Tells all hosts how the job has ended."""
        self._tell_all(end=code, why="")
        self.loop.close()

    def _tell_all(self, **message: Any) -> None:
        """Tells all hosts the last that there is to say."""
        self._listener.close()
        self.ask_all(**message)
        # They end the connection.
        self.loop.wait(lambda: not self._hosts, time.monotonic() + _END_SECONDS)

    async def _open(self, deadline: float) -> None:
        for each in await gathering.listen_for(self._group, deadline):
            self._listening_at.append(each.getsockname()[0])
            self._listener.start(each)

    async def _welcome(self, proven: ProvenConnection) -> None:
        # A host that is lost needs to know nothing.
        lost = contextlib.suppress(OSError, MessageError)
        with contextlib.closing(proven.stream), lost:
            await self._serve(proven)

    async def _serve(self, proven: ProvenConnection) -> None:
        its = f"node {proven.peer} ({proven.host})"
        refusal = await gathering.refusal(its, proven, self._group)
        if refusal:
            self._listener.strangers[proven.host] = refusal
            return
        with contextlib.closing(Talk(self.loop, proven)) as talk:
            await self._hear(talk, proven.peer)

    async def _hear(self, talk: Talk, number: int) -> None:
        told = await talk.hear()
        slots, host_name = told.get("slots"), told.get("host_name")
        if type(slots) is not int or not 0 < slots <= _MOST_SLOTS:
            return
        if any(each.number == number for each in self._hosts.values()):
            talk.say(refused=_TWICE.format(number))
            # It ends the connection.
            await talk.hear()
            return
        # What has happened on it before counts no more.
        self._times[number] += 1
        again = "-" + str(self._times[number])
        name = f"node{number}{again if again != '-1' else ''}@{host_name}"
        host = self._hosts[name] = _Host(talk, number, slots)
        self.on_change(self.named)
        try:
            while True:
                told = await talk.hear()
                if "leaves" in told:
                    host.slots = 0
                    self.on_change(self.named)
                await self.on_told(name, told)
        finally:
            del self._hosts[name]
            self.on_lost(name, f"{name} is not connected any more", LOST)
            self.on_change(self.named)
