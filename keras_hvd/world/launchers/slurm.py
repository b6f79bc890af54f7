"""The way by which `srun`'s ranks on several nodes learn where to meet.

Rank 0 listens on the step's first node, at a port that follows from the numbers of the
job and the step, or at one of the next. There it hands out a fresh secret and the place
to meet, as a credential of MUNGE. Only processes of the same user can read it. It holds
a number that the asking rank has drawn, so an earlier one is of no use. If the user has
set a secret, the ranks meet at that port at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_hvd.exceptions import RendezvousError
from keras_hvd.job import settings
from keras_hvd.world.launchers import munge
from keras_hvd.world.launchers.launcher import Way, World
from keras_hvd.world.rendezvous import address as addresses
from keras_hvd.world.rendezvous import connection, event_loop, network_interfaces
from keras_hvd.world.rendezvous import secret as secret_module
from keras_hvd.world.rendezvous.address import Address
from keras_hvd.world.rendezvous.connection import Stream, UnprovenError
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.listener import Listener, listen, listen_at_free_ports
from keras_hvd.world.rendezvous.ranks import MeetingPoint, RankIdentity
from keras_hvd.world.rendezvous.secret import Secret

# Below the ports that Linux gives to connections.
_PORTS = range(16384, 32768)
# Other programs may have some of them.
_TRIED_PORTS = 4

_SECRET_BYTES = 32
_NONCE_BYTES = 32
_MOST_BYTES = 1 << 16

# A question: the magic number, a nonce, and the step's name.
_QUESTION = struct.Struct(f"!8s{_NONCE_BYTES}s80s")
_MAGIC = b"KHVDSLU\x01"
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True)
class Step(Way):
    """A step of a Slurm job on several nodes, as one of its ranks knows it.

    Example:

    >>> Step("slurm-12.0", "node1", is_on_first_node=True).ports()
    range(25028, 25032)
    """

    name: str
    first_node: str
    is_on_first_node: bool

    def ports(self) -> range:
        """The ports of the first node where rank 0 may listen, in the order to try."""
        ports = settings.ports() or _PORTS
        last = max(1, len(ports) - _TRIED_PORTS)
        first = zlib.crc32(self.name.encode()) % last
        return ports[first : first + _TRIED_PORTS]

    def places(self, interfaces: Sequence[str]) -> list[Address]:
        """The places to look for rank 0, in order. Raises RendezvousError."""
        hosts = [self.first_node]
        if self.is_on_first_node:
            # On that node, its name may stand for a loopback address.
            hosts = network_interfaces.reachable(interfaces)
        return [Address(host, port) for port in self.ports() for host in hosts]

    def arrange(
        self,
        world: World,
        members: Sequence[int],
        identity: RankIdentity,
        timeout: float,
    ) -> MeetingPoint:
        if secret_module.is_set(os.environ):
            given = secret_module.take(os.environ)
            listening = _listen(self, identity.interfaces) if world.rank == 0 else []
            return MeetingPoint(self.places(identity.interfaces), given, listening)
        try:
            if world.rank == 0:
                return _invite(self, identity.interfaces)
            return _accept(self, world.rank, identity.interfaces, timeout)
        except munge.UnavailableError as error:
            raise RendezvousError(
                "srun started the ranks of this job on several nodes, and rank 0 hands "
                f"the others a secret by MUNGE. {error}. Or else {secret_module.HOW}"
            ) from None


def _invite(step: Step, interfaces: Sequence[str]) -> MeetingPoint:
    """Makes rank 0 listen; its arrangement tells the others where."""
    content = secrets.token_bytes(_SECRET_BYTES)
    with contextlib.ExitStack() as opened:
        asked_at = [opened.enter_context(one) for one in _listen(step, interfaces)]
        hosts = [one.getsockname()[0] for one in asked_at]
        meeting_at = [opened.enter_context(one) for one in listen_at_free_ports(hosts)]
        places = [Address(*one.getsockname()[:2]) for one in meeting_at]
        told = {"step": step.name, "addresses": places, "secret": content.hex()}
        # A failure must show before others rely on it.
        _credential(told, b"")
        opened.pop_all()
    return MeetingPoint(
        places,
        Secret(content),
        meeting_at,
        lambda loop: _hand_out(loop, step, told, asked_at),
    )


def _listen(step: Step, interfaces: Sequence[str]) -> list[socket.socket]:
    """Sockets at the first of the step's ports that is free on this host."""
    hosts = network_interfaces.reachable(interfaces)
    for port in step.ports():
        try:
            return listen([Address(host, port) for host in hosts])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(
                    f"rank 0 cannot listen at {error.filename}: {error.strerror}"
                ) from None
    raise RendezvousError(
        f"rank 0 cannot listen at any port from {step.ports()[0]} to "
        f"{step.ports()[-1]} of {step.first_node}, since other programs do: start the "
        "step again, or set KERAS_HVD_RENDEZVOUS to HOST:PORT of this node, and "
        "KERAS_HVD_SECRET_FILE, for all ranks"
    )


async def _hand_out(
    loop: EventLoop,
    step: Step,
    told: dict[str, Any],
    listening: Sequence[socket.socket],
) -> None:
    """Answers the other ranks' questions, until the loop ends."""

    async def answer(stream: Stream) -> None:
        magic, nonce, name = _QUESTION.unpack(await stream.receive(_QUESTION.size))
        if magic != _MAGIC or name.rstrip(b"\0") != step.name.encode():
            raise UnprovenError("they do not belong here")
        credential = _credential(told, nonce)
        await stream.send(_LENGTH.pack(len(credential)) + credential)
        stream.close()

    async def welcome(_: None) -> None:
        """Does nothing: nothing more follows."""

    with contextlib.closing(Listener(loop, answer, welcome)) as listener:
        for each in listening:
            listener.start(each)
        await event_loop.pause(math.inf)


def _credential(told: dict[str, Any], nonce: bytes) -> bytes:
    content = json.dumps({**told, "nonce": nonce.hex()})
    return munge.encode(content.encode(), os.geteuid())


def _accept(
    step: Step, rank: int, interfaces: Sequence[str], timeout: float
) -> MeetingPoint:
    """Asks rank 0, once it is there."""
    # Without MUNGE there is nothing to wait for.
    munge.encode(b"", os.geteuid())

    async def ask(stream: Stream) -> MeetingPoint:
        with contextlib.closing(stream):
            nonce = secrets.token_bytes(_NONCE_BYTES)
            await stream.send(_QUESTION.pack(_MAGIC, nonce, step.name.encode()))
            (length,) = _LENGTH.unpack(await stream.receive(_LENGTH.size))
            if length > _MOST_BYTES:
                raise UnprovenError("it does not speak as keras_hvd does")
            return _read(step, nonce, await stream.receive(length))

    places = step.places(interfaces)
    reaching = connection.reach(
        ask,
        lambda: [one for place in places for one in addresses.resolve(place)],
        network_interfaces.sources(interfaces),
        time.monotonic() + timeout,
    )
    try:
        return EventLoop().run(reaching)
    except OSError as error:
        raise RendezvousError(
            f"rank {rank} could not reach rank 0 at any port from {step.ports()[0]} to "
            f"{step.ports()[-1]} of {step.first_node} within {timeout:g} s: "
            f"{error.strerror or error}. Look at rank 0's own error; all nodes must "
            "know that node's name, and its firewall pass these ports. Or set "
            "KERAS_HVD_RENDEZVOUS to HOST:PORT of that node, and KERAS_HVD_SECRET_FILE"
        ) from None


def _read(step: Step, nonce: bytes, credential: bytes) -> MeetingPoint:
    """Reads rank 0's message. Raises UnprovenError if it is from another sender."""
    try:
        content, uid = munge.decode(credential)
    except munge.CredentialError as error:
        raise UnprovenError(f"MUNGE refuses what it sent: {error}") from None
    if uid != os.geteuid():
        raise UnprovenError(f"it is a process of user {uid}")
    # Another user may repeat a credential that this user has made for another purpose.
    try:
        told = json.loads(content)
        said = told["step"], told["nonce"]
    except (ValueError, TypeError, KeyError):
        raise UnprovenError("what it sent was not made for this") from None
    if said != (step.name, nonce.hex()):
        raise UnprovenError("it repeats what was sent before")
    places = [Address(host, port) for host, port in told["addresses"]]
    return MeetingPoint(places, Secret(bytes.fromhex(told["secret"])))
