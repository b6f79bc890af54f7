"""All members of a group meet at one of them, and all get the same verdict.

A group is the ranks of a job, or the `khvdrun`s of its hosts. Member 0 listens at the
address that all know. Each of the others connects, both prove the secret, and it tells
of itself. When all are there, member 0 answers all, or tells all why the job cannot
start. The connections stay until the end, so all learn of a member that fails later.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from keras_hvd.exceptions import RendezvousError
from keras_hvd.version import __version__
from keras_hvd.world.rendezvous import address as addresses
from keras_hvd.world.rendezvous import connection, event_loop, network_interfaces
from keras_hvd.world.rendezvous.address import Address
from keras_hvd.world.rendezvous.connection import BeginTls, Call, ProvenConnection
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.listener import Listener, listen
from keras_hvd.world.rendezvous.messages import MessageError, pack
from keras_hvd.world.rendezvous.proof import Hello, Purpose

# After the deadline, for a verdict that is the same everywhere.
_VERDICT_SECONDS = 2.0

# Between two checks whether this host has the address.
_PAUSE_SECONDS = 0.5

# A longer wait is said.
_SILENT_SECONDS = 10.0

_MOST_TOLD_BYTES = 1 << 16
_MOST_ANSWER_BYTES_PER_MEMBER = 1 << 12
_MOST_NAMED = 20

# The only keys of messages that are not the members' own.
REFUSED = "refused"
FAILED = "failed"

# Hosts whose number is fixed, and hosts that may come and go, at the same place.
_OF_HOSTS = {Purpose.NODES, Purpose.HOSTS}


@dataclass(frozen=True)
class Group:
    """A group, as one of its members knows it before they meet.

    Example:

    >>> place = Address("node0", 29400)
    >>> group = Group("rank", Purpose.RANKS, 0, 4, [place], b"", 60)
    >>> group.name([1, 2]), group.name([3]), group.place
    ('ranks 1 and 2', 'rank 3', 'node0:29400')
    """

    member: str  # the noun for a member: rank or node
    purpose: Purpose
    number: int  # of this member
    count: int  # of all members
    addresses: Sequence[Address]  # of member 0, in the order to try
    key: bytes
    timeout: float  # seconds
    interfaces: Sequence[str] = ()
    tls: BeginTls | None = None
    # Member 0's sockets, if it listens already.
    listening: Sequence[socket.socket] = ()
    # Shows the user a text about a wait.
    say: Callable[[str], None] | None = None

    @property
    def place(self) -> str:
        """The place to meet, in messages."""
        return " or ".join(map(str, self.addresses))

    def resolved(self) -> list[Address]:
        """The IP addresses of member 0, in the order to try. Raises OSError."""
        return [one for each in self.addresses for one in addresses.resolve(each)]

    def name(self, numbers: Sequence[int]) -> str:
        """The names of members in messages."""
        shown = [str(number) for number in numbers[:_MOST_NAMED]]
        if len(numbers) > _MOST_NAMED:
            shown.append(f"{len(numbers) - _MOST_NAMED} more")
        if len(shown) == 1:
            return f"{self.member} {shown[0]}"
        return f"{self.member}s {', '.join(shown[:-1])} and {shown[-1]}"

    def is_expected(self, theirs: Hello) -> bool:
        """Whether one may come to member 0, if only to learn why it is refused."""
        is_here = theirs.receiver == 0 and theirs.sender > 0
        own = _OF_HOSTS if self.purpose in _OF_HOSTS else {self.purpose}
        return is_here and theirs.purpose in own

    def sources(self) -> list[str]:
        """IP addresses of the interfaces that the user named; none: any."""
        return network_interfaces.sources(self.interfaces)


class _Member:
    """Another member, as member 0 knows it."""

    def __init__(self, proven: ProvenConnection, told: dict[str, Any]):
        self.proven = proven
        self.told = told
        self.said: collections.deque[dict[str, Any]] = collections.deque()

    def __str__(self) -> str:
        host, process = self.told.get("host_name"), self.told.get("pid")
        return f"on {host} ({self.proven.host}), process {process}"


class RendezvousServer:
    """Member 0, as it meets the others. `loop` is running, and everything ends with it.

    `objection` checks a member's message about itself, by the member's number, and
    returns what is wrong with it; "" if nothing.
    """

    def __init__(
        self,
        loop: EventLoop,
        group: Group,
        deadline: float,
        objection: Callable[[int, dict[str, Any]], str],
    ):
        self.listening_at: list[str] = []
        """IP addresses that the others can reach."""
        self._loop = loop
        self._group = group
        self._deadline = deadline
        self._objection = objection
        self._members: dict[int, _Member] = {}
        self._surplus: list[_Member] = []
        self._failure = ""
        self._keeps = False
        self._listener = Listener(
            loop,
            connection.proving(group.key, group.tls, group.is_expected),
            self._welcome,
        )

    async def open(self) -> None:
        """Listens at the group's address. Raises RendezvousError."""
        for each in await listen_for(self._group, self._deadline):
            self.listening_at.append(each.getsockname()[0])
            self._listener.start(each)

    async def told(self) -> list[dict[str, Any]]:
        """Waits for the message of each other member about itself, in their order."""
        others = self._group.count - 1

        def are_here() -> bool:
            return bool(self._failure) or len(self._members) == others

        group, silent = self._group, time.monotonic() + _SILENT_SECONDS
        say = group.say if silent < self._deadline else None
        if say is not None and not await event_loop.until(are_here, silent):
            say(
                f"{group.name(self._absent())} of {group.count} did not come so far. "
                f"It waits for {group.timeout:g} s{self._hints()}"
            )
        await self._until(are_here, self._missing)
        # A member that comes now has nothing to wait for.
        self._listener.close()
        return [self._members[number].told for number in range(1, others + 1)]

    async def answer(self, *answers: dict[str, Any]) -> None:
        """Sends each of the others its answer, or all of them the same."""
        # Packed once: for thousands of ranks, a table is long.
        packed = [pack(each) for each in answers]
        for number, member in self._members.items():
            # A lost member is noticed where it is waited for.
            with contextlib.suppress(OSError):
                await member.proven.send_packed(packed[(number - 1) % len(packed)])

    async def heard(self) -> list[dict[str, Any]]:
        """Waits for one more message of each of the others, in their order."""
        members = [member for _, member in sorted(self._members.items())]
        await self._until(lambda: all(one.said for one in members), self._not_ready)
        return [one.said.popleft() for one in members]

    def keep(self) -> list[ProvenConnection]:
        """Leaves the connections to the other members open, and returns them."""
        self._keeps = True
        return [member.proven for _, member in sorted(self._members.items())]

    @property
    def failure(self) -> str:
        """The error with which the next wait ends; "" for none."""
        return self._failure

    def fail(self, text: str) -> None:
        """Makes the current or next wait end with this error, unless there is one."""
        self._failure = self._failure or text

    def close(self) -> None:
        """Ends listening."""
        self._listener.close()

    async def refuse(self, text: str) -> NoReturn:
        """Tells all members why the job cannot start, and raises RendezvousError."""
        self._listener.close()
        patience = time.monotonic() + _VERDICT_SECONDS
        for member in [*self._members.values(), *self._surplus]:
            member.proven.stream.deadline = patience
            with contextlib.suppress(OSError):
                await member.proven.send({REFUSED: text})
        raise RendezvousError(text)

    async def _until(
        self, condition: Callable[[], bool], reason: Callable[[], str]
    ) -> None:
        is_in_time = await event_loop.until(
            lambda: bool(self._failure) or condition(), self._deadline
        )
        if self._failure:
            await self.refuse(self._failure)
        if not is_in_time:
            await self.refuse(reason())

    async def _welcome(self, proven: ProvenConnection) -> None:
        try:
            await self._serve(proven)
        finally:
            if not self._keeps:
                proven.stream.close()

    async def _serve(self, proven: ProvenConnection) -> None:
        name = f"{self._group.member} {proven.peer}"
        its = f"{name} ({proven.host})"
        difference = await refusal(its, proven, self._group)
        if difference:
            self.fail(difference)
            return
        proven.stream.deadline = self._deadline + _VERDICT_SECONDS
        try:
            told = await proven.receive(_MOST_TOLD_BYTES)
        except MessageError as error:
            self.fail(f"a message of {name} ({proven.host}) is refused: {error}")
            return
        except OSError:
            # The member may have given this connection up, and come by another one.
            return
        member = _Member(proven, told)
        self._seat(proven.peer, member, name)
        await self._follow(member, name)
        # The shared verdict goes this way too.
        await event_loop.pause(math.inf)

    def _seat(self, number: int, member: _Member, name: str) -> None:
        group = self._group
        if number >= group.count:
            self._surplus.append(member)
            self.fail(
                f"{name} came, {member}, but {group.member} 0 knows of {group.count} "
                f"{group.member}s: start all with the same number"
            )
        elif number in self._members:
            self._surplus.append(member)
            self.fail(
                f"{name} came twice, {self._members[number]}, and {member}: give each "
                f"{group.member} a number of its own"
            )
        else:
            self._members[number] = member
            objection = self._objection(number, member.told)
            if objection:
                self.fail(f"{name}, {member}: {objection}")

    async def _follow(self, member: _Member, name: str) -> None:
        """Receives the messages of a member after its first."""
        while True:
            try:
                message = await member.proven.receive(_MOST_TOLD_BYTES)
            except MessageError as error:
                self.fail(f"a message of {name}, {member}, is refused: {error}")
                return
            except OSError:
                self.fail(f"{name}, {member}, ended while the job was starting")
                return
            if FAILED not in message:
                member.said.append(message)
            elif message[FAILED]:
                self.fail(f"{name}, {member}: {message[FAILED]}")
            elif len(self._members) == self._group.count - 1:
                self.fail(self._not_ready())
            else:
                self.fail(self._missing(name))

    def _missing(self, by: str = "") -> str:
        group = self._group
        who = by or f"{group.member} 0, at {group.place},"
        text = (
            f"{who} waited {group.timeout:g} s, and {group.name(self._absent())} of "
            f"{group.count} did not come: start all within --start-timeout "
            "(KERAS_HVD_INIT_TIMEOUT_SECONDS), and look at their own errors"
        )
        return text + self._hints()

    def _absent(self) -> list[int]:
        return [n for n in range(1, self._group.count) if n not in self._members]

    def _hints(self) -> str:
        return hints(self._group, self._listener, self.listening_at)

    def _not_ready(self) -> str:
        missing = [n for n, member in self._members.items() if not member.said]
        # If all others are ready, they wait for this one.
        return (
            f"{self._group.name(missing or [0])} could not connect to the others "
            f"within {self._group.timeout:g} s"
        )


class RendezvousClient:
    """Another member, as it meets member 0. All ends with `loop`, which is running."""

    def __init__(self, loop: EventLoop, group: Group, deadline: float):
        self._loop = loop
        self._group = group
        self._deadline = deadline
        self._messages: collections.deque[dict[str, Any]] = collections.deque()
        self._failure = ""
        self._opened = contextlib.ExitStack()
        self._proven: ProvenConnection

    async def connect(self) -> str:
        """Connects to member 0, once it is there; returns this host's IP address."""
        group = self._group
        place = group.purpose, group.number, 0
        call = Call(group.key, *place, group.sources(), group.tls)
        host = f"{group.member} 0 at {group.place}"
        try:
            proven = await self._reach(call, host)
        except connection.RefusedError as error:
            raise RendezvousError(
                f"{host} refuses {group.member} {group.number}: {error}"
            ) from None
        except OSError as error:
            raise RendezvousError(
                f"{group.member} {group.number} could not reach {host} within "
                f"{group.timeout:g} s: {error.strerror or error}. Start "
                f"{group.member} 0 on that host, let its firewall pass the port, and "
                "look at its own error"
            ) from None
        self._opened.callback(proven.stream.close)
        own = f"{group.member} {group.number}"
        difference = difference_of(host, proven, own, group)
        if difference:
            raise RendezvousError(difference)
        proven.stream.deadline = self._deadline + _VERDICT_SECONDS
        self._proven = proven
        return proven.stream.socket.getsockname()[0]

    async def _reach(self, call: Call, host: str) -> ProvenConnection:
        group, silent = self._group, time.monotonic() + _SILENT_SECONDS
        if group.say is not None and silent < self._deadline:
            try:
                return await connection.connect(call, group.resolved, silent)
            except connection.RefusedError:
                raise
            except OSError as error:
                group.say(
                    f"{host} cannot be reached so far: {error.strerror or error}. It "
                    f"tries for {group.timeout:g} s"
                )
        return await connection.connect(call, group.resolved, self._deadline)

    async def tell(self, told: dict[str, Any]) -> dict[str, Any]:
        """Sends member 0 the message about this member, and waits for the answer."""
        await self._send(told)
        self._loop.start(self._follow())
        return await self._next(self._deadline)

    async def say(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends one more message, and waits for the answer once all have done so."""
        await self._send(message)
        # A member that is not ready at the deadline can still report why.
        return await self._next(self._deadline + _VERDICT_SECONDS / 2)

    def close(self) -> None:
        """Ends the connection to member 0."""
        self._opened.close()

    def keep(self) -> list[ProvenConnection]:
        """Leaves the connection to member 0 open, and returns it."""
        self._opened.pop_all()
        return [self._proven]

    @property
    def failure(self) -> str:
        """The reason why the job cannot start, or that member 0 is gone; else ""."""
        return self._failure

    async def give_up(self, text: str) -> NoReturn:
        """Tells member 0 why, waits for the shared verdict, and raises that."""
        # Without a text of its own, member 0 knows better who is late.
        if not self._failure:
            await self._send({FAILED: text})
            patience = time.monotonic() + _VERDICT_SECONDS
            await event_loop.until(lambda: bool(self._failure), patience)
        raise RendezvousError(self._failure or text or self._no_answer())

    async def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            # The loss of member 0 shows when the answer is read.
            await self._proven.send(message)

    async def _next(self, deadline: float) -> dict[str, Any]:
        await event_loop.until(lambda: bool(self._messages or self._failure), deadline)
        if not self._messages:
            await self.give_up("")
        return self._messages.popleft()

    async def _follow(self) -> None:
        """Receives the messages of member 0."""
        limit = _MOST_TOLD_BYTES + _MOST_ANSWER_BYTES_PER_MEMBER * self._group.count
        host = f"{self._group.member} 0 at {self._group.place}"
        while not self._failure:
            try:
                message = await self._proven.receive(limit)
            except MessageError as error:
                self._failure = f"a message of {host} is refused: {error}"
            except TimeoutError:
                return
            except OSError:
                self._failure = f"{host} ended while the job was starting"
            else:
                if REFUSED in message:
                    self._failure = str(message[REFUSED])
                else:
                    self._messages.append(message)

    def _no_answer(self) -> str:
        group = self._group
        return (
            f"{group.member} 0 at {group.place} did not answer within "
            f"{group.timeout:g} s"
        )


def about_this_process() -> dict[str, Any]:
    """The facts that every member tells of itself, for messages."""
    return {"host_name": socket.gethostname(), "pid": os.getpid()}


def hints(group: Group, listener: Listener[Any], listening_at: Sequence[str]) -> str:
    """What member 0 knows of why others did not come, as more sentences.

    Args:
        group: the group.
        listener: member 0's.
        listening_at: its IP addresses.
    """
    text = ""
    for host, reason in listener.strangers.items():
        text += f". Connections from {host} were refused: {reason}"
    is_local = all(Address(one, 0).is_loopback for one in listening_at)
    hosts = [one.host for one in group.addresses]
    if is_local and listening_at and not all(map(_is_loopback_by_name, hosts)):
        text += (
            f". Here {' or '.join(hosts)} means {listening_at[0]}, which other hosts "
            "cannot reach: give an IP address, or name the interface by "
            "KERAS_HVD_NETWORK_INTERFACES"
        )
    return text


async def refusal(its: str, proven: ProvenConnection, group: Group) -> str:
    """Explains why member 0 cannot go on with another one; "" if it can.

    The other one then knows it too: it finds it by itself, or is told.
    """
    difference = difference_of(its, proven, f"{group.member} 0", group)
    if difference or proven.purpose == group.purpose:
        return difference
    theirs, own = "with", "without"
    if group.purpose == Purpose.HOSTS:
        theirs, own = own, theirs
    text = (
        f"{its} was started {theirs} a range of --nnodes, as 2:4, or --min-np, and "
        f"{group.member} 0 {own}: give all hosts the same options"
    )
    proven.stream.deadline = time.monotonic() + _VERDICT_SECONDS
    with contextlib.suppress(OSError):
        await proven.send({REFUSED: text})
    return text


async def listen_for(group: Group, deadline: float) -> list[socket.socket]:
    """Listens at the group's address, as soon as this host has it.

    The name of a pod may be unknown for half a minute after its start, or be that of
    the pod before it.
    """
    if group.listening:
        return list(group.listening)
    say = group.say
    while True:
        try:
            wanted = [
                Address(source, one.port)
                for source in group.sources()
                for one in group.addresses
            ]
            return listen(wanted or group.resolved())
        except OSError as error:
            failure = (
                f"{group.member} 0 cannot listen at {error.filename or group.place}: "
                f"{error.strerror or error}. {_ADVICE}"
            )
            may_pass = _may_pass(error)
            if not may_pass or time.monotonic() + _PAUSE_SECONDS > deadline:
                waited = f" It tried for {group.timeout:g} s" if may_pass else ""
                raise RendezvousError(failure + waited) from None
            if say is not None:
                say(f"{failure} It tries for {group.timeout:g} s")
                say = None
        await event_loop.pause(_PAUSE_SECONDS)


def _may_pass(error: OSError) -> bool:
    """Whether a name, or this host's own, may still become known."""
    is_of_name = isinstance(error, socket.gaierror)
    return is_of_name or error.errno == errno.EADDRNOTAVAIL


_ADVICE = (
    "The rendezvous must be an address of the host where it runs, with a port that no "
    "other program has."
)


def difference_of(its: str, proven: ProvenConnection, own: str, group: Group) -> str:
    """Explains why this process cannot go on with another one; "" if it can."""
    if proven.version != __version__:
        return (
            f"{its} runs keras_hvd {proven.version}, and {own} {__version__}: install "
            "the same version on all hosts"
        )
    if proven.tls == (group.tls is not None):
        return ""
    with_tls, without = (its, own) if proven.tls else (own, its)
    return (
        f"{with_tls} was started with TLS, and {without} without: give khvdrun --tls "
        "(or set KERAS_HVD_TLS=1) on all hosts, or on none"
    )


def _is_loopback_by_name(host: str) -> bool:
    try:
        return Address(host, 0).is_loopback
    except ValueError:
        return host == "localhost"
