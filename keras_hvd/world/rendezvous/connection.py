"""Connections between processes of a job: proven first, then with messages."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from keras_hvd.world.rendezvous import event_loop, proof
from keras_hvd.world.rendezvous.address import Address
from keras_hvd.world.rendezvous.event_loop import READ, WRITE
from keras_hvd.world.rendezvous.messages import HEADER_BYTES, Opener, Sealer, pack
from keras_hvd.world.rendezvous.proof import Handshake, Hello, Purpose, Role

_Result = TypeVar("_Result")

PROOF_SECONDS = 5.0
"""How long a connection may take to prove itself."""

_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5


class UnprovenError(OSError):
    """The other end is no process of this job, or the connection was tampered with."""


class RefusedError(UnprovenError):
    """The other end tells that this process' proof is wrong."""


class Tls(Protocol):
    """TLS over a connected socket, which does not block."""

    def handshake(self) -> int:
        """Continues the handshake; returns what to wait for, or 0 at its end.

        Raises OSError, as UnprovenError if the other end does not have the key.
        """

    def send(self, content: memoryview, /) -> int:
        """Like `socket.send`. After blocking, the same bytes must come first."""

    def recv(self, size: int, /) -> bytes:
        """Like `socket.recv`. Raises MessageError too, if bytes were changed."""

    def close(self) -> None:
        """Ends TLS, and leaves the socket open."""

    def detach(self) -> int:
        """Hands TLS over to the engine, as an address."""


BeginTls = Callable[[socket.socket, Role, bytes, bytes], Tls]
"""Makes TLS over a socket, from this end's role, and the identity and key of both."""


class Stream:
    """The bytes of a connection, until a deadline."""

    def __init__(self, connected: socket.socket, deadline: float):
        connected.setblocking(False)
        self.socket = connected
        self.deadline = deadline
        self.tls: Tls | None = None

    async def begin_tls(
        self, begin: BeginTls, role: Role, credentials: tuple[bytes, bytes]
    ) -> None:
        """Encrypts everything from here on. Raises OSError."""
        self.tls = begin(self.socket, role, *credentials)
        while event := self.tls.handshake():
            await self._wait(event)

    async def send(self, content: bytes) -> None:
        """Sends all of it. Raises OSError."""
        left = memoryview(content)
        while left:
            try:
                left = left[self._send(left) :]
            except BlockingIOError:
                await self._wait(WRITE)

    async def receive(self, size: int) -> bytes:
        """Receives exactly `size` bytes.

        Raises OSError, and MessageError if TLS shows that they were changed.
        """
        content = bytearray()
        while len(content) < size:
            try:
                received = (self.tls or self.socket).recv(size - len(content))
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
        if self.tls is not None:
            self.tls.close()
        self.socket.close()

    def _send(self, content: memoryview) -> int:
        if self.tls is not None:
            return self.tls.send(content)
        # A closed other end must not end this process.
        return self.socket.send(content, socket.MSG_NOSIGNAL)

    async def _wait(self, event: int) -> None:
        if not await event_loop.ready(self.socket, event, self.deadline):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


class ProvenConnection:
    """A connection whose other end has proven that it knows the secret."""

    def __init__(self, stream: Stream, theirs: Hello, keys: proof.Session):
        self.stream = stream
        self.peer = theirs.sender
        self.purpose = theirs.purpose
        self.number = theirs.number
        self.version = theirs.version
        self.tls = theirs.tls
        self.host = stream.socket.getpeername()[0]
        self._sealer = Sealer(keys.sends)
        self._opener = Opener(keys.receives)

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a message. Raises OSError."""
        await self.send_packed(pack(message))

    async def send_packed(self, content: bytes) -> None:
        """Sends the result of `messages.pack`, or any bytes. Raises OSError."""
        await self.stream.send(self._sealer.seal(content))

    async def receive(self, limit: int) -> dict[str, Any]:
        """Receives a message of at most `limit` bytes. Raises OSError, MessageError."""
        return self._opener.open(*await self._receive(limit))

    async def receive_packed(self, limit: int) -> bytes:
        """Receives at most `limit` bytes. Raises OSError, MessageError."""
        header, content = await self._receive(limit)
        self._opener.check(header, content)
        return content

    async def _receive(self, limit: int) -> tuple[bytes, bytes]:
        header = await self.stream.receive(HEADER_BYTES)
        content = await self.stream.receive(self._opener.length(header, limit))
        return header, content


@dataclass(frozen=True)
class Call:
    """A connection to make: its two ends, and its purpose."""

    key: bytes
    purpose: Purpose
    sender: int
    receiver: int
    sources: Sequence[str] = ()  # IP addresses to connect from; none: any
    tls: BeginTls | None = None
    number: int = 0  # which of the connections for this purpose


async def prove_as_client(stream: Stream, call: Call) -> ProvenConnection:
    """Both ends of a new connection prove the secret. Raises OSError."""
    wanted = call.purpose, call.sender, call.receiver, call.tls is not None
    mine = proof.hello(Role.CLIENT, *wanted, call.number)
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
    if call.tls is not None and _agree(mine, theirs):
        await stream.begin_tls(call.tls, Role.CLIENT, shared.tls_credentials())
    return ProvenConnection(stream, theirs, shared.session(Role.CLIENT))


async def prove_as_server(
    stream: Stream,
    key: bytes,
    tls: BeginTls | None,
    is_expected: Callable[[Hello], bool],
) -> ProvenConnection:
    """Both ends of an accepted connection prove the secret. Raises OSError."""
    asked = await stream.receive(proof.HELLO_BYTES)
    theirs = proof.unpack(asked)
    if theirs is None or theirs.role != Role.CLIENT:
        raise UnprovenError("they do not speak as keras_hvd does")
    if not is_expected(theirs):
        raise UnprovenError("they do not belong here")
    mine = theirs.answer(tls is not None)
    await stream.send(mine.pack())
    shared = Handshake(key, asked, mine.pack())
    if not shared.is_proof(await stream.receive(proof.PROOF_BYTES), Role.CLIENT):
        await stream.send(proof.REFUSAL)
        raise UnprovenError("they have another secret, or another job's name")
    await stream.send(shared.proof(Role.SERVER))
    if tls is not None and _agree(mine, theirs):
        await stream.begin_tls(tls, Role.SERVER, shared.tls_credentials())
    return ProvenConnection(stream, theirs, shared.session(Role.SERVER))


def proving(
    key: bytes, tls: BeginTls | None, is_expected: Callable[[Hello], bool]
) -> Callable[[Stream], Coroutine[Any, Any, ProvenConnection]]:
    """Makes an accepted connection prove itself, if its hello is expected."""
    return lambda stream: prove_as_server(stream, key, tls, is_expected)


def _agree(mine: Hello, theirs: Hello) -> bool:
    """Whether both go on in the same way; if not, both know, and report it."""
    return (mine.version, mine.tls) == (theirs.version, theirs.tls)


async def connect(
    call: Call, addresses: Callable[[], Sequence[Address]], deadline: float
) -> ProvenConnection:
    """Connects to a process of this job, and tries again until it is there.

    At the deadline, raises the most telling OSError. Raises RefusedError at once,
    unless the process may be at another port.
    """

    async def prove(stream: Stream) -> ProvenConnection:
        return await prove_as_client(stream, call)

    return await reach(prove, addresses, call.sources, deadline)


async def reach(
    speak: Callable[[Stream], Coroutine[Any, Any, _Result]],
    addresses: Callable[[], Sequence[Address]],
    sources: Sequence[str],
    deadline: float,
) -> _Result:
    """Connects, and tries again until `speak` succeeds with the other end.

    Raises as `connect` does.
    """
    seconds = _FIRST_PAUSE_SECONDS
    stranger = None
    places: Sequence[Address] = ()
    while True:
        try:
            places = addresses()
            return await _reach_one(speak, places, sources, deadline)
        except OSError as error:
            if isinstance(error, RefusedError) and len({x.port for x in places}) == 1:
                raise
            if isinstance(error, UnprovenError):
                stranger = error
            if time.monotonic() + seconds > deadline:
                raise stranger or error from None
        await event_loop.pause(seconds)
        seconds = min(1.5 * seconds, _LONGEST_PAUSE_SECONDS)


async def _reach_one(
    speak: Callable[[Stream], Coroutine[Any, Any, _Result]],
    addresses: Sequence[Address],
    sources: Sequence[str],
    deadline: float,
) -> _Result:
    """Connects to the first of these addresses at which the process is."""
    failure = OSError("it has no address of the right family")
    for address in addresses:
        source = _source(sources, address)
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
                result = await speak(stream)
            except OSError as error:
                # Keeps the most telling error.
                if isinstance(error, RefusedError) or not isinstance(
                    failure, UnprovenError
                ):
                    failure = error
                continue
            opened.pop_all()
            stream.deadline = deadline
            return result
    raise failure


def _source(sources: Sequence[str], address: Address) -> str | None:
    """The IP address to connect from: "" for any, None if there is none."""
    if not sources:
        return ""
    same = [one for one in sources if Address(one, 0).family == address.family]
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
        # Without a listener, a port of this host may be connected with itself.
        raise ConnectionRefusedError(
            errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)
        )
