"""Connections between processes of a job: proven first, then with messages."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_hvd.rendezvous import event_loop, proof
from keras_hvd.rendezvous.address import Address
from keras_hvd.rendezvous.event_loop import READ, WRITE
from keras_hvd.rendezvous.messages import HEADER_BYTES, Opener, Sealer
from keras_hvd.rendezvous.proof import Handshake, Hello, Purpose, Role

PROOF_SECONDS = 5.0
"""How long a connection may take to prove itself."""

_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5


class UnprovenError(OSError):
    """The other end is no process of this job, or the connection was tampered with."""


class RefusedError(UnprovenError):
    """The other end says that this process' proof is wrong."""


class Stream:
    """The bytes of a connection, until a time."""

    def __init__(self, connected: socket.socket, deadline: float):
        connected.setblocking(False)
        self.socket = connected
        self.deadline = deadline

    async def send(self, content: bytes) -> None:
        """Sends all of it. Raises OSError."""
        left = memoryview(content)
        while left:
            try:
                # Whoever closed the other end must not end this process.
                left = left[self.socket.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                await self._wait(WRITE)

    async def receive(self, size: int) -> bytes:
        """Receives so many bytes, and takes no more than these. Raises OSError."""
        content = bytearray()
        while len(content) < size:
            try:
                received = self.socket.recv(size - len(content))
            except BlockingIOError:
                await self._wait(READ)
                continue
            if not received:
                raise ConnectionResetError(
                    errno.ECONNRESET, "the connection was closed"
                )
            content += received
        return bytes(content)

    def close(self) -> None:
        """Ends the connection."""
        self.socket.close()

    async def _wait(self, event: int) -> None:
        if not await event_loop.ready(self.socket, event, self.deadline):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


class ProvenConnection:
    """A connection whose other end has proven that it knows the secret."""

    def __init__(self, stream: Stream, theirs: Hello, keys: proof.Session):
        self.stream = stream
        self.peer = theirs.sender
        self.purpose = theirs.purpose
        self.version = theirs.version
        self.host = stream.socket.getpeername()[0]
        self._sealer = Sealer(keys.sends)
        self._opener = Opener(keys.receives)

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a message. Raises OSError."""
        await self.stream.send(self._sealer.seal(message))

    async def receive(self, limit: int) -> dict[str, Any]:
        """Receives a message of at most so many bytes. Raises OSError, MessageError."""
        header = await self.stream.receive(HEADER_BYTES)
        content = await self.stream.receive(self._opener.length(header, limit))
        return self._opener.open(header, content)


@dataclass(frozen=True)
class Call:
    """Who connects to whom, and what for."""

    key: bytes
    purpose: Purpose
    sender: int
    receiver: int
    sources: Sequence[str] = ()  # IP addresses to connect from; none: any


async def prove_as_client(stream: Stream, call: Call) -> ProvenConnection:
    """Both ends of a new connection prove the secret. Raises OSError."""
    mine = proof.hello(Role.CLIENT, call.purpose, call.sender, call.receiver)
    await stream.send(mine.pack())
    answer = await stream.receive(proof.HELLO_BYTES)
    theirs = proof.unpack(answer)
    if theirs is None or not theirs.answers(mine):
        raise UnprovenError("it does not speak as keras_hvd does")
    shared = Handshake(call.key, mine.pack(), answer)
    await stream.send(shared.proof(Role.CLIENT))
    proven = await stream.receive(proof.PROOF_BYTES)
    if proven == proof.REFUSAL:
        raise RefusedError("it has another secret, or another job's name")
    if not shared.is_proof(proven, Role.SERVER):
        raise UnprovenError("it does not know the secret")
    return ProvenConnection(stream, theirs, shared.session(Role.CLIENT))


async def prove_as_server(
    stream: Stream, key: bytes, is_expected: Callable[[Hello], bool]
) -> ProvenConnection:
    """Both ends of an accepted connection prove the secret. Raises OSError."""
    asked = await stream.receive(proof.HELLO_BYTES)
    theirs = proof.unpack(asked)
    if theirs is None or theirs.role != Role.CLIENT:
        raise UnprovenError("they do not speak as keras_hvd does")
    if not is_expected(theirs):
        raise UnprovenError("they do not belong here")
    mine = theirs.answer()
    await stream.send(mine.pack())
    shared = Handshake(key, asked, mine.pack())
    if not shared.is_proof(await stream.receive(proof.PROOF_BYTES), Role.CLIENT):
        await stream.send(proof.REFUSAL)
        raise UnprovenError("they have another secret, or another job's name")
    await stream.send(shared.proof(Role.SERVER))
    return ProvenConnection(stream, theirs, shared.session(Role.SERVER))


async def connect(
    call: Call, addresses: Callable[[], Sequence[Address]], deadline: float
) -> ProvenConnection:
    """Connects to a process of this job, and tries again until it is there.

    When it is too late, raises the OSError that says most. Raises RefusedError at once.
    """
    seconds = _FIRST_PAUSE_SECONDS
    stranger = None
    while True:
        try:
            return await _connect_to_one(call, addresses(), deadline)
        except RefusedError:
            raise
        except OSError as error:
            if isinstance(error, UnprovenError):
                stranger = error
            if time.monotonic() + seconds > deadline:
                raise stranger or error from None
        await event_loop.pause(seconds)
        seconds = min(1.5 * seconds, _LONGEST_PAUSE_SECONDS)


async def _connect_to_one(
    call: Call, addresses: Sequence[Address], deadline: float
) -> ProvenConnection:
    """Connects to the first of these addresses where the process is."""
    failure = OSError("it has no address of the right family")
    for address in addresses:
        source = _source(call, address)
        if source is None:
            continue
        stream = Stream(
            socket.socket(address.family, socket.SOCK_STREAM),
            min(deadline, time.monotonic() + PROOF_SECONDS),
        )
        with contextlib.ExitStack() as opened:
            opened.callback(stream.close)
            try:
                await _open(stream, source, address)
                proven = await prove_as_client(stream, call)
            except RefusedError:
                raise
            except OSError as error:
                failure = error
                continue
            opened.pop_all()
            stream.deadline = deadline
            return proven
    raise failure


def _source(call: Call, address: Address) -> str | None:
    """The IP address to connect from: "" for any, None if there is none."""
    if not call.sources:
        return ""
    same = [one for one in call.sources if Address(one, 0).family == address.family]
    return same[0] if same else None


async def _open(stream: Stream, source: str, address: Address) -> None:
    opening = stream.socket
    opening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if source:
        opening.bind((source, 0))
    code = opening.connect_ex(address)
    if code == errno.EINPROGRESS:
        if not await event_loop.ready(opening, WRITE, stream.deadline):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        code = opening.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code != 0:
        raise OSError(code, os.strerror(code))
    if opening.getsockname() == opening.getpeername():
        # Where nobody listens, a port of this host may be connected with itself.
        raise ConnectionRefusedError(
            errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)
        )
