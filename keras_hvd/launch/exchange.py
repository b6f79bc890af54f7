"""Carries a call from `keras_hvd.run` to ranks on other hosts, and outcomes back.

Each rank connects to the process that called `run`. Both prove that they know a secret
before they read anything else. The connection stays until the rank has handed over its
outcome. If the connection ends before, so has the rank.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from keras_hvd.exceptions import RendezvousError
from keras_hvd.job import process_limit, settings
from keras_hvd.version import __version__
from keras_hvd.world import tls
from keras_hvd.world.rendezvous import (
    address,
    connection,
    event_loop,
    network_interfaces,
)
from keras_hvd.world.rendezvous import secret as secret_of_job
from keras_hvd.world.rendezvous.address import Address
from keras_hvd.world.rendezvous.connection import BeginTls, Call, ProvenConnection
from keras_hvd.world.rendezvous.event_loop import READ, EventLoop
from keras_hvd.world.rendezvous.listener import Listener, listen_at_free_ports
from keras_hvd.world.rendezvous.messages import MessageError
from keras_hvd.world.rendezvous.proof import Hello, Purpose
from keras_hvd.world.rendezvous.secret import Secret

_Value = TypeVar("_Value")

# How ranks find the process that called `run`.
_ADDRESSES = "KERAS_HVD_CALLER"
_SECRET = "KERAS_HVD_CALLER_SECRET"

_CALLER = 0  # its number in hellos
_MOST_MESSAGE_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20
_FIRST_MESSAGE_SECONDS = 60.0
# After a failure, for the other ranks to end, and to report why.
_LATE_SECONDS = 5.0

# With these, a host that vanishes during the function is noticed after a minute. No
# firewall forgets a connection that waits for a long one.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)

# The keys of messages.
_HOST = "host"
_SIZE = "size"
_BYTES = "bytes"
_AGE = "age"
_FAILED = "failed"
_REFUSED = "refused"


@dataclass(frozen=True)
class Arrived:
    """An outcome that a rank has handed over.

    Args:
        rank: its number.
        raised_at: when it raised an error, by this host's clock.
        outcome: what it has sent.
    """

    rank: int
    raised_at: float
    outcome: BinaryIO


class Exchange:
    """Gives ranks the call and takes their outcomes, in a thread, within a context.

    Args:
        call: the call for the ranks.
        ranks: how many there are; None: any number may come, each again and again.
        variables: the ranks' environment, without `Exchange.variables`.

    Raises:
        RendezvousError: this host has no such interface, or a secret cannot be read.
        LibraryError: there is no TLS here, although it is wanted.
        ValueError: a variable is malformed.

    Example:

    >>> import tempfile
    >>> call, got = (tempfile.TemporaryFile() for _ in range(2))
    >>> call.write(b"the call"), call.flush()
    (8, None)
    >>> here = {"KERAS_HVD_NETWORK_INTERFACES": "lo"}
    >>> with Exchange(call, 1, here) as exchange:
    ...     caller = Caller({**here, **exchange.variables}, 0, 1)
    ...     caller.ask(got)
    ...     caller.tell(got, has_failed=False, age=0.0)
    >>> [(each.rank, each.outcome.read()) for each in exchange.arrived]
    [(0, b'the call')]
    """

    def __init__(self, call: BinaryIO, ranks: int | None, variables: Mapping[str, str]):
        self._call = call
        self._ranks = ranks
        drawn = secrets.token_hex(32)
        self._key = _key(variables, drawn)
        self._tls = tls.chosen(variables)
        names = settings.network_interfaces(variables)
        self._sockets = listen_at_free_ports(
            network_interfaces.reachable(names), variables
        )
        places = [str(Address(*one.getsockname()[:2])) for one in self._sockets]
        self.variables = {_ADDRESSES: ",".join(places), _SECRET: drawn}
        """The additions to the ranks' environment."""
        self.hosts: dict[int, str] = {}
        """Of the ranks that have come."""
        self.arrived: list[Arrived] = []
        """The outcomes, in the order in which they came."""
        self.lost: dict[int, str] = {}
        """Ranks that came and ended without an outcome, in this order.

        With the reason, if it is not that the rank's process ended.
        """
        self.arrived_before_loss = 0
        """How many outcomes had come when the last of these ended."""
        self.on_late: Callable[[], object] = lambda: None
        """Called if the job has not ended soon after a rank failed."""
        self.is_late = False
        """Whether it was called."""
        self._has_failed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._end, self._ended = socket.socketpair()

    def __enter__(self) -> Exchange:
        try:
            self._thread.start()
        except RuntimeError as error:
            raise RuntimeError(process_limit.no_room()) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._end.close()
        self._thread.join()
        self._ended.close()
        if kind is None and self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            loop = EventLoop()
            prove = connection.proving(self._key, self._tls, _is_expected)
            with contextlib.closing(Listener(loop, prove, self._welcome)) as listener:
                for one in self._sockets:
                    listener.start(one)
                if self._ranks is not None:
                    loop.start(self._await_end())
                loop.run(event_loop.ready(self._ended, READ, math.inf))
        except Exception as error:
            self._failure = error
            # No rank can hand over its outcome any more.
            self._end_job()

    async def _await_end(self) -> None:
        # mpirun may wait for a host that it cannot reach.
        await event_loop.until(lambda: self._has_failed, math.inf)
        await event_loop.pause(_LATE_SECONDS)
        self._end_job()

    def _end_job(self) -> None:
        self.is_late = True
        self.on_late()

    async def _welcome(self, proven: ProvenConnection) -> None:
        rank = proven.peer
        try:
            if _difference(proven, self._tls):
                # The rank sees it as well, and says so.
                return
            _keep_alive(proven)
            proven.stream.deadline = time.monotonic() + _FIRST_MESSAGE_SECONDS
            told = await proven.receive(_MOST_MESSAGE_BYTES)
            objection = self._objection(rank, told)
            if objection:
                await proven.send({_REFUSED: objection})
                return
            host = _field(told, _HOST, str)
        except (OSError, MessageError):
            # It may come by another connection.
            return
        else:
            self.hosts[rank] = host
            # One that is started again has not ended any more.
            self.lost.pop(rank, None)
            await self._serve(proven, rank)
        finally:
            proven.stream.close()

    def _objection(self, rank: int, told: dict[str, Any]) -> str:
        """Explains why `told` is from no rank of the job; "" if it is from one."""
        if self._ranks is None:
            return ""
        if told.get(_SIZE) != self._ranks or rank >= self._ranks:
            return (
                f"it is of a job of {told.get(_SIZE)}, and keras_hvd.run started "
                f"{self._ranks} ranks: the program that started it must tell it its "
                "place"
            )
        if rank in self.hosts:
            return f"rank {rank} has come from {self.hosts[rank]} already"
        return ""

    async def _serve(self, proven: ProvenConnection, rank: int) -> None:
        proven.stream.deadline = math.inf
        outcome = io.BytesIO()
        try:
            await _send(proven, self._call, {})
            told = await proven.receive(_MOST_MESSAGE_BYTES)
            raised_at = time.monotonic() - _field(told, _AGE, float)
            await _receive(proven, told, outcome)
        except (OSError, MessageError) as error:
            is_end = isinstance(error, ConnectionError)
            self.lost[rank] = "" if is_end else str(error)
            self.arrived_before_loss = len(self.arrived)
            self._has_failed = True
            return
        self.arrived.append(Arrived(rank, raised_at, outcome))
        self._has_failed |= told.get(_FAILED) is True
        # An outcome that has arrived counts, even if the rank then fails.
        with contextlib.suppress(OSError):
            await proven.send({})


class Caller:
    """The process that called `run`, as a rank knows it.

    Removes its address and secret from `variables`, so programs that the rank starts do
    not inherit them.
    """

    def __init__(
        self, variables: MutableMapping[str, str], rank: int, size: int | None
    ):
        places, drawn = (variables.pop(name) for name in (_ADDRESSES, _SECRET))
        self._addresses = [address.parse(one) for one in places.split(",")]
        self._rank = rank
        self._size = size
        self._timeout = settings.init_timeout(variables)
        self._call = Call(
            *(_key(variables, drawn), Purpose.CALL, rank, _CALLER),
            network_interfaces.sources(settings.network_interfaces(variables)),
            tls.chosen(variables),
        )
        self._proven: ProvenConnection

    def ask(self, call: BinaryIO) -> None:
        """Writes the call to a file. Raises RendezvousError."""
        self._speak(self._ask(call))

    def tell(self, outcome: BinaryIO, has_failed: bool, age: float) -> None:
        """Hands over the outcome, which was made `age` seconds ago.

        Raises RendezvousError.
        """
        self._speak(self._tell(outcome, {_FAILED: has_failed, _AGE: age}))

    def _speak(self, words: Coroutine[Any, Any, None]) -> None:
        try:
            EventLoop().run(words)
        except (OSError, MessageError) as error:
            raise RendezvousError(
                f"{self._own} cannot speak with the process that called keras_hvd.run, "
                f"at {' or '.join(map(str, self._addresses))}: "
                f"{getattr(error, 'strerror', None) or error}. Hosts must reach each "
                "other's ports; network_interface chooses among networks"
            ) from None

    @property
    def _own(self) -> str:
        return f"rank {self._rank} on {socket.gethostname()}"

    async def _ask(self, call: BinaryIO) -> None:
        deadline = time.monotonic() + self._timeout
        proven = await connection.connect(self._call, lambda: self._addresses, deadline)
        self._proven = proven
        # In a child's hands it would outlive this process.
        os.register_at_fork(after_in_child=proven.stream.socket.close)
        difference = _difference(proven, self._call.tls)
        if difference:
            raise RendezvousError(
                f"{self._own} and the process that called keras_hvd.run have "
                f"{difference}"
            )
        _keep_alive(proven)
        # The process that called may be stopped for a while.
        proven.stream.deadline = math.inf
        await proven.send({_HOST: socket.gethostname(), _SIZE: self._size})
        told = await proven.receive(_MOST_MESSAGE_BYTES)
        if _REFUSED in told:
            raise RendezvousError(f"{self._own} is refused: {told[_REFUSED]}")
        await _receive(proven, told, call)

    async def _tell(self, outcome: BinaryIO, told: dict[str, Any]) -> None:
        await _send(self._proven, outcome, told)
        # If this process ended before all has arrived, it would seem to have failed.
        await self._proven.receive(_MOST_MESSAGE_BYTES)


def _key(variables: Mapping[str, str], drawn: str) -> bytes:
    """The key of the proofs: from the user's own file if there is one."""
    path = variables.get(secret_of_job.FILE_VARIABLE)
    known = Secret(drawn.encode())
    if path:
        known = secret_of_job.read({secret_of_job.FILE_VARIABLE: path})
    return known.key(f"keras_hvd.run {drawn}")


def _is_expected(theirs: Hello) -> bool:
    is_here = theirs.receiver == _CALLER and theirs.sender >= 0
    return is_here and theirs.purpose == Purpose.CALL


def _difference(proven: ProvenConnection, tls: BeginTls | None) -> str:
    """Explains why this process and another one cannot go on; "" if they can."""
    if proven.version != __version__:
        return (
            f"keras_hvd {__version__} and {proven.version}: install the same version "
            "on all hosts"
        )
    if proven.tls != (tls is not None):
        return "TLS here or there alone: KERAS_HVD_TLS=1 is for all or none"
    return ""


def _keep_alive(proven: ProvenConnection) -> None:
    for option in _KEEPALIVE:
        proven.stream.socket.setsockopt(*option)


async def _send(
    proven: ProvenConnection, file: BinaryIO, message: dict[str, Any]
) -> None:
    """Sends a message, with the file's size, and then the file."""
    size = os.fstat(file.fileno()).st_size
    await proven.send({**message, _BYTES: size})
    for at in range(0, size, _CHUNK_BYTES):
        await proven.send_packed(os.pread(file.fileno(), _CHUNK_BYTES, at))


async def _receive(
    proven: ProvenConnection, message: dict[str, Any], file: BinaryIO
) -> None:
    """Writes the bytes after a message to the file, which then is at its beginning."""
    left = _field(message, _BYTES, int)
    if left < 0:
        raise MessageError("its size is negative")
    while left > 0:
        content = await proven.receive_packed(min(left, _CHUNK_BYTES))
        left -= file.write(content)
    file.seek(0)


def _field(message: dict[str, Any], name: str, kind: type[_Value]) -> _Value:
    value = message.get(name)
    if type(value) is not kind:
        raise MessageError(f"it has no {name}")
    return value
