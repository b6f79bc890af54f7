"""How ranks that `srun` has started on several nodes learn where to meet.

Rank 0 listens on the step's first node, at a port that follows from the names of the
job and the step, or at one of the next. There it hands out a fresh secret, and where
the ranks meet, as a credential of MUNGE: only processes of the same user can read it,
and it holds what the asking rank has drawn, so an earlier one is of no use. Where the
user has set a secret, the ranks meet at that port at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from keras_hvd.exceptions import RendezvousError
from keras_hvd.rendezvous import address as addresses
from keras_hvd.rendezvous import connection, munge, network_interfaces
from keras_hvd.rendezvous import secret as secret_module
from keras_hvd.rendezvous.address import Address
from keras_hvd.rendezvous.connection import Stream, UnprovenError
from keras_hvd.rendezvous.event_loop import EventLoop
from keras_hvd.rendezvous.listener import Listener, listen, listen_at_free_ports
from keras_hvd.rendezvous.ranks import Arrangement
from keras_hvd.rendezvous.secret import Secret

# Below the ports that Linux gives to connections.
_FIRST_PORT, _LAST_PORT = 16384, 32767
# Where other programs may have some of them.
_TRIED_PORTS = 4

_SECRET_BYTES = 32
_NONCE_BYTES = 32
_MOST_BYTES = 1 << 16

# A question: the magic number, a nonce, and the step's name.
_QUESTION = struct.Struct(f"!8s{_NONCE_BYTES}s80s")
_MAGIC = b"KHVDSLU\x01"
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True)
class Step:
    """A step of a Slurm job on several nodes, as one of its ranks knows it."""

    name: str
    node: str  # the first one
    rank: int
    interfaces: Sequence[str]

    def places(self) -> list[Address]:
        """Where rank 0 may listen.

        Example:

        >>> places = Step("slurm-12.0", "node1", rank=0, interfaces=()).places()
        >>> [str(each) for each in places[:2]]
        ['node1:25028', 'node1:25029']
        """
        choices = _LAST_PORT + 1 - _FIRST_PORT - _TRIED_PORTS
        first = _FIRST_PORT + zlib.crc32(self.name.encode()) % choices
        return [Address(self.node, first + each) for each in range(_TRIED_PORTS)]


def arrange(step: Step, timeout: float) -> Arrangement:
    """Where the ranks of a step meet. Raises RendezvousError.

    The others wait until rank 0 has told them, if the user has set no secret.
    """
    if secret_module.is_set(os.environ):
        given = secret_module.take(os.environ)
        return Arrangement(step.places(), given, () if step.rank else _listen(step))
    try:
        return _accept(step, timeout) if step.rank else _invite(step)
    except munge.UnavailableError as error:
        raise RendezvousError(
            "srun started the ranks of this job on several nodes, and MUNGE, by which "
            f"rank 0 hands the others a secret, cannot be used ({error}). "
            f"Without it, {secret_module.HOW}"
        ) from None


def _invite(step: Step) -> Arrangement:
    """Rank 0 listens, and is to tell the others where."""
    content = secrets.token_bytes(_SECRET_BYTES)
    with contextlib.ExitStack() as opened:
        asked_at = [opened.enter_context(one) for one in _listen(step)]
        hosts = [one.getsockname()[0] for one in asked_at]
        meeting_at = [opened.enter_context(one) for one in listen_at_free_ports(hosts)]
        places = [Address(*one.getsockname()[:2]) for one in meeting_at]
        told = {"addresses": places, "secret": content.hex()}
        # Before others rely on it.
        _credential(step, b"", told)
        opened.pop_all()
    return Arrangement(
        places,
        Secret(content),
        meeting_at,
        lambda loop: _handing_out(loop, step, told, asked_at),
    )


def _listen(step: Step) -> list[socket.socket]:
    """Sockets at the first of the step's ports that is free on this host."""
    hosts = network_interfaces.reachable(step.interfaces)
    ports = [place.port for place in step.places()]
    for port in ports:
        try:
            return listen([Address(host, port) for host in hosts])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(
                    f"rank 0 cannot listen at {error.filename}: {error.strerror}"
                ) from None
    raise RendezvousError(
        f"rank 0 cannot listen at any port from {ports[0]} to {ports[-1]} of "
        f"{step.node}, which follow from the step's name, since other programs do: "
        "start the step again, or set KERAS_HVD_RENDEZVOUS to HOST:PORT of this node, "
        "and KERAS_HVD_SECRET_FILE, for all ranks"
    )


@contextlib.contextmanager
def _handing_out(
    loop: EventLoop, step: Step, told: dict, asked_at: Sequence[socket.socket]
) -> Iterator[None]:
    async def answer(stream: Stream) -> None:
        magic, nonce, name = _QUESTION.unpack(await stream.receive(_QUESTION.size))
        if magic != _MAGIC or name.rstrip(b"\0") != step.name.encode():
            raise UnprovenError("they do not belong here")
        credential = _credential(step, nonce, told)
        await stream.send(_LENGTH.pack(len(credential)) + credential)
        stream.close()

    listener = Listener(loop, answer, _is_served)
    with contextlib.closing(listener):
        for each in asked_at:
            listener.start(each)
        yield


async def _is_served(_: None) -> None:
    """Nothing more follows."""


def _credential(step: Step, nonce: bytes, told: dict) -> bytes:
    content = {"step": step.name, "nonce": nonce.hex(), **told}
    return munge.encode(json.dumps(content).encode(), os.geteuid())


def _accept(step: Step, timeout: float) -> Arrangement:
    """Asks rank 0, when it is there."""
    # Without MUNGE there is nothing to wait for.
    munge.encode(b"", os.geteuid())

    async def ask(stream: Stream) -> Arrangement:
        with contextlib.closing(stream):
            nonce = secrets.token_bytes(_NONCE_BYTES)
            await stream.send(_QUESTION.pack(_MAGIC, nonce, step.name.encode()))
            (length,) = _LENGTH.unpack(await stream.receive(_LENGTH.size))
            if length > _MOST_BYTES:
                raise UnprovenError("it does not speak as keras_hvd does")
            return _read(step, nonce, await stream.receive(length))

    reaching = connection.reach(
        ask,
        _resolving(step.places()),
        network_interfaces.sources(step.interfaces),
        time.monotonic() + timeout,
    )
    try:
        return EventLoop().run(reaching)
    except OSError as error:
        first, *_, last = step.places()
        raise RendezvousError(
            f"rank {step.rank} could not reach rank 0 at {first} to {last.port} within "
            f"{timeout:g} s: {error.strerror or error}. Look at rank 0's own error. "
            "All nodes must know the first one's name, and its firewall must let these "
            "ports pass; KERAS_HVD_RENDEZVOUS and KERAS_HVD_SECRET_FILE name another "
            "place"
        ) from None


def _resolving(places: Sequence[Address]) -> Callable[[], list[Address]]:
    return lambda: [one for place in places for one in addresses.resolve(place)]


def _read(step: Step, nonce: bytes, credential: bytes) -> Arrangement:
    """What rank 0 has told. Raises UnprovenError if it is from somebody else."""
    try:
        content, uid = munge.decode(credential)
    except munge.CredentialError as error:
        raise UnprovenError(f"MUNGE refuses what it sent: {error}") from None
    if uid != os.geteuid():
        raise UnprovenError(f"it is a process of user {uid}")
    try:
        told = json.loads(content)
        said = told["step"], told["nonce"]
    except (ValueError, TypeError, KeyError):
        raise UnprovenError("what it sent was not made for this") from None
    if said != (step.name, nonce.hex()):
        raise UnprovenError("it repeats what was sent before")
    places = [Address(host, port) for host, port in told["addresses"]]
    return Arrangement(places, Secret(bytes.fromhex(told["secret"])))
