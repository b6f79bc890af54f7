"""Runs a command on a host that has joined the job, as ssh does elsewhere.

`khvdrun` starts one end as its launch agent. This asks the other host, through its
`khvdrun`, to connect here and run the command. Both ends prove the secret, and what
goes through is sealed or, with TLS, encrypted.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from keras_hvd.exceptions import RendezvousError
from keras_hvd.job import settings
from keras_hvd.world import renewal, tls
from keras_hvd.world.rendezvous import address as addresses
from keras_hvd.world.rendezvous import connection, event_loop, secret
from keras_hvd.world.rendezvous import listener as listeners
from keras_hvd.world.rendezvous.address import Address
from keras_hvd.world.rendezvous.connection import (
    BeginTls,
    Call,
    ProvenConnection,
    UnprovenError,
)
from keras_hvd.world.rendezvous.event_loop import READ, WRITE, EventLoop
from keras_hvd.world.rendezvous.listener import Listener
from keras_hvd.world.rendezvous.messages import MessageError
from keras_hvd.world.rendezvous.proof import Purpose
from keras_hvd.world.renewal import Words

_CHUNK_BYTES = 1 << 16
# As ssh's exit code.
_UNREACHABLE = 255
_PROGRAM = (sys.executable, "-m", "keras_hvd.launch.tunnel")


def agent(job: str, own_host: str) -> tuple[str, ...]:
    """A launch agent for hosts that have joined: a host and a command follow it.

    Args:
        job: the name at which `khvdrun` listens.
        own_host: this host, as the others reach it.
    """
    return *_PROGRAM, "listen", job, own_host


def dial(at: str, name: str, command: str) -> list[str]:
    """The command line of the other end, which connects to the place `at`."""
    return [*_PROGRAM, "dial", at, name, command]


def _listen(job: str, own_host: str, host: str, command: str) -> int:
    """Has the other host run the command; its input and output are this process'."""
    (own, *_) = addresses.resolve(Address(own_host, 0))
    place = listeners.listen_early(own.host)
    name = f"{job}.tunnel.{os.getpid()}"
    with contextlib.closing(Words(renewal.dial(job))) as words:
        words.say("reach", host=host, at=str(place), name=name, command=command)
    loop, begin = EventLoop(), tls.chosen(os.environ)
    reached: list[ProvenConnection] = []

    async def welcome(proven: ProvenConnection) -> None:
        reached.append(proven)

    async def run() -> None:
        proving = connection.proving(
            *(secret.read(os.environ).key(name), begin),
            lambda theirs: theirs.purpose == Purpose.TUNNEL,
        )
        listener = Listener(loop, proving, welcome)
        (listening,) = listeners.take_early(place)
        listener.start(listening)
        timeout = settings.init_timeout()
        deadline = time.monotonic() + timeout
        await event_loop.until(lambda: bool(reached), deadline)
        listener.close()
        if not reached:
            # It may be gone.
            raise TimeoutError(f"it has not connected for {timeout:g} s")
        _require_alike(reached[0], begin)
        await _through(loop, reached[0], 0, 1)

    loop.run(run())
    return 0


def _dial(at: str, name: str, command: str) -> int:
    """Runs the command, whose input and output are the other end's."""
    place = addresses.parse(at)
    loop, begin = EventLoop(), tls.chosen(os.environ)

    async def run() -> int:
        call = Call(
            *(secret.read(os.environ).key(name), Purpose.TUNNEL, 1, 0),
            tls=begin,
        )
        deadline = time.monotonic() + settings.init_timeout()
        proven = await connection.connect(call, lambda: [place], deadline)
        proven.stream.deadline = math.inf
        _require_alike(proven, begin)
        own = proven.stream.socket.getsockname()[0]
        started = subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # As ssh tells by which of its addresses a host was reached.
            env={**os.environ, "SSH_CONNECTION": f"{place.host} 0 {own} 0"},
        )
        assert started.stdin is not None and started.stdout is not None
        ends = started.stdout.fileno(), started.stdin.fileno()
        await _through(loop, proven, *ends)
        # Without its input, it ends, and with it all that it has started.
        started.stdin.close()
        return started.wait()

    return loop.run(run())


async def _through(
    loop: EventLoop, proven: ProvenConnection, reading: int, writing: int
) -> None:
    """Passes on what comes from both sides, until nothing more comes from the other.

    An empty message is the end of what one side has.
    """
    for each in (reading, writing):
        os.set_blocking(each, False)

    async def send() -> None:
        # The end of the connection is noticed where it is read.
        with contextlib.suppress(OSError):
            content = b"!"
            while content:
                await event_loop.ready(reading, READ, math.inf)
                content = os.read(reading, _CHUNK_BYTES)
                await proven.send_packed(content)

    sending = loop.start(send())
    with contextlib.suppress(OSError, MessageError):
        while content := await proven.receive_packed(_CHUNK_BYTES):
            left = memoryview(content)
            while left:
                await event_loop.ready(writing, WRITE, math.inf)
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(writing, left) :]
    loop.cancel(sending)


def _require_alike(proven: ProvenConnection, own: BeginTls | None) -> None:
    """Raises UnprovenError if only one end has TLS: nothing may be sent then."""
    if proven.tls != (own is not None):
        raise UnprovenError("only one of the two hosts has TLS")


def main(arguments: Sequence[str]) -> int:
    """Is one of the ends."""
    end, *rest = arguments
    try:
        return (_listen if end == "listen" else _dial)(*rest)
    except (OSError, RendezvousError) as error:
        where = f"cannot reach {rest[0]}" if end == "dial" else f"{rest[2]}"
        print(f"khvdrun: {where}: {error}", file=sys.stderr, flush=True)
        return _UNREACHABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
