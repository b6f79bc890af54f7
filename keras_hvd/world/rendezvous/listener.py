"""Accepts connections, and passes on those that have proven themselves.

Strangers can only connect. Each has a few seconds to prove itself, and there are at
most MOST_UNPROVEN of them. When more come, the oldest is dropped.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import math
import os
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from keras_hvd.exceptions import RendezvousError
from keras_hvd.job import settings
from keras_hvd.world.rendezvous import connection, event_loop
from keras_hvd.world.rendezvous.address import Address
from keras_hvd.world.rendezvous.connection import Stream
from keras_hvd.world.rendezvous.event_loop import READ, EventLoop, Task

_Proven = TypeVar("_Proven")

MOST_UNPROVEN = 128

# For this time, the oldest is not dropped for newer ones: it lets a process of this job
# prove itself, even in a flood.
_SPARED_SECONDS = 0.25

_BACKLOG = 4096
_PAUSE_SECONDS = 0.01
_MOST_STRANGERS = 8  # named in messages


@dataclass(frozen=True)
class _Stranger:
    """A connection that has not proven itself so far."""

    task: Task
    arrived: float


class Listener(Generic[_Proven]):
    """Listens at some addresses of this host, until it is closed.

    `prove` makes a connection prove itself, or raises OSError. `welcome` gets its
    result.
    """

    def __init__(
        self,
        loop: EventLoop,
        prove: Callable[[Stream], Coroutine[Any, Any, _Proven]],
        welcome: Callable[[_Proven], Coroutine[Any, Any, None]],
    ):
        self._loop = loop
        self._prove = prove
        self._welcome = welcome
        # In the order of arrival.
        self._unproven: collections.OrderedDict[Stream, _Stranger] = (
            collections.OrderedDict()
        )
        self._accepting: list[tuple[Task, socket.socket]] = []
        self.strangers: dict[str, str] = {}
        """IP addresses of ends that did not prove themselves, and why not."""

    def start(self, listening: socket.socket) -> None:
        """Accepts connections of a socket, which then belongs to this object."""
        task = self._loop.start(self._accept(listening))
        self._accepting.append((task, listening))

    def close(self) -> None:
        """Ends listening, and all unproven connections."""
        for task, listening in self._accepting:
            self._loop.cancel(task)
            listening.close()
        self._accepting.clear()
        while self._unproven:
            self._drop_oldest()

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            await event_loop.ready(listening, READ, math.inf)
            await self._make_room()
            try:
                accepted, (host, *_) = listening.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                await self._survive(error)
            else:
                now = time.monotonic()
                stream = Stream(accepted, now + connection.PROOF_SECONDS)
                task = self._loop.start(self._admit(stream, host))
                self._unproven[stream] = _Stranger(task, now)

    async def _survive(self, error: OSError) -> None:
        """Goes on after a connection that could not be accepted."""
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            await event_loop.pause(_PAUSE_SECONDS)
            return
        if not self._unproven:
            raise RendezvousError(
                "this process cannot open more connections: raise the limit of open "
                "files (ulimit -n)"
            )
        self._drop_oldest()

    async def _make_room(self) -> None:
        if len(self._unproven) < MOST_UNPROVEN:
            return
        oldest = next(iter(self._unproven.values()))
        has_room = await event_loop.until(
            lambda: len(self._unproven) < MOST_UNPROVEN,
            oldest.arrived + _SPARED_SECONDS,
        )
        if not has_room:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        stream, stranger = self._unproven.popitem(last=False)
        self._loop.cancel(stranger.task)
        stream.close()

    async def _admit(self, stream: Stream, host: str) -> None:
        try:
            stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            proven = await self._prove(stream)
        except OSError as error:
            self._note(host, error)
            stream.close()
            return
        finally:
            self._unproven.pop(stream, None)
        stream.deadline = math.inf
        await self._welcome(proven)

    def _note(self, host: str, error: OSError) -> None:
        is_known = isinstance(error, connection.UnprovenError)
        if host in self.strangers or len(self.strangers) < _MOST_STRANGERS:
            self.strangers[host] = str(error) if is_known else "they sent no proof"


def listen(addresses: Sequence[Address]) -> list[socket.socket]:
    """Sockets that listen at those of the addresses that belong to this host.

    Port 0 stands for any free port. Raises OSError, with the address as its filename.

    Example:

    >>> sockets = listen([Address("127.0.0.1", 0)])
    >>> [one.getsockname()[0] for one in sockets]
    ['127.0.0.1']
    """
    sockets: list[socket.socket] = []
    elsewhere = None
    with contextlib.ExitStack() as opened:
        for address in addresses:
            try:
                sockets.append(opened.enter_context(_listen(address)))
            except OSError as error:
                error.filename = str(address)
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                elsewhere = error
        if not sockets and elsewhere is not None:
            raise elsewhere
        opened.pop_all()
    return sockets


def listen_at_free_ports(
    hosts: Sequence[str], variables: Mapping[str, str] = os.environ
) -> list[socket.socket]:
    """Sockets of a rank, at these IP addresses of this host. Raises RendezvousError.

    KERAS_HVD_PORTS, among the variables, limits the ports.

    Example:

    >>> sockets = listen_at_free_ports(["127.0.0.1"])
    >>> sockets[0].getsockname()[1] > 0
    True
    """
    ports = settings.ports(variables)
    try:
        with contextlib.ExitStack() as opened:
            sockets = [opened.enter_context(_listen_in(host, ports)) for host in hosts]
            opened.pop_all()
        return sockets
    except OSError as error:
        raise RendezvousError(
            f"this process cannot listen at {error.filename}: {error.strerror}"
        ) from None


# Sockets of this process that listen before it joins a job, by their addresses.
_early: dict[Address, socket.socket] = {}


def listen_early(host: str) -> Address:
    """Listens at a free port of this host, for the job that this process will join.

    Nobody else gets the port meanwhile, and ranks that come sooner wait. Raises
    RendezvousError.

    Example:

    >>> place = listen_early("127.0.0.1")
    >>> take_early(place)[0].getsockname() == place
    True
    >>> take_early(place)
    []
    """
    (listening,) = listen_at_free_ports([host])
    address = Address(*listening.getsockname()[:2])
    _early[address] = listening
    return address


def adopt_early(descriptor: int) -> None:
    """Takes a socket of `listen_early` from another process, by its descriptor."""
    listening = socket.socket(fileno=os.dup(descriptor))
    _early[Address(*listening.getsockname()[:2])] = listening


def take_early(address: Address) -> list[socket.socket]:
    """The socket of `listen_early` at this address, if it was not taken before."""
    found = _early.pop(address, None)
    return [] if found is None else [found]


def _listen_in(host: str, ports: range) -> socket.socket:
    """A socket at the first of the ports that is free; at any one if there are none."""
    for port in ports or [0]:
        address = Address(host, port)
        try:
            return _listen(address)
        except OSError as error:
            error.filename = str(address)
            if error.errno != errno.EADDRINUSE:
                raise
    raise RendezvousError(
        f"this process cannot listen at {host}: other programs, or ranks, have every "
        f"port of KERAS_HVD_PORTS={ports[0]}-{ports[-1]}, and each rank of a host "
        "takes one: give it more ports"
    )


def _listen(address: Address) -> socket.socket:
    listening = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier job may still be in TIME_WAIT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening
