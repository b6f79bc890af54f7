"""The `khvdrun` of a host that joins an elastic job: the first host starts its ranks.

It stays connected, and starts what it is asked to. A signal makes its ranks leave at
their next commit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from keras_hvd.exceptions import RendezvousError
from keras_hvd.launch import processes, tunnel
from keras_hvd.launch.job import TRY_AGAIN
from keras_hvd.launch.joined_hosts import ALIVE_SECONDS, MOST_BYTES, PATIENCE_SECONDS
from keras_hvd.world.rendezvous import address as addresses
from keras_hvd.world.rendezvous import event_loop, gathering
from keras_hvd.world.rendezvous.connection import BeginTls, ProvenConnection
from keras_hvd.world.rendezvous.event_loop import READ, EventLoop
from keras_hvd.world.rendezvous.gathering import Group, RendezvousClient
from keras_hvd.world.rendezvous.messages import MessageError
from keras_hvd.world.rendezvous.nodes import Node, NotMetError
from keras_hvd.world.rendezvous.proof import Purpose
from keras_hvd.world.rendezvous.secret import Secret

_MOST_SIGNALS = 4096
_TO_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(node: Node, secret: Secret, timeout: float, tls: BeginTls | None) -> int:
    """Joins the job of node 0, and returns `khvdrun`'s exit code.

    That is the job's, 0 if this host has left before, or that for another try if node 0
    is gone. Raises NotMetError if it is not reached.
    """
    group = Group(
        member="node",
        purpose=Purpose.HOSTS,
        number=node.number,
        count=node.count,
        addresses=[addresses.parse(node.rendezvous)],
        key=secret.key(""),
        timeout=timeout,
        interfaces=node.interfaces,
        tls=tls,
    )
    # Another try does not change a malformed name.
    group.sources()
    # Some parents leave it ignored, and then no process can wait for a child.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    loop = EventLoop()
    try:
        return loop.run(_Joined(loop, group, node.ranks).run())
    except RendezvousError as error:
        raise NotMetError(str(error)) from None


class _Joined:
    def __init__(self, loop: EventLoop, group: Group, ranks: int):
        self._loop = loop
        self._group = group
        self._ranks = ranks
        self._started: list[subprocess.Popen[bytes]] = []
        self._to_say: list[dict[str, Any]] = []
        self._is_leaving = False
        self._code: int | None = None

    async def run(self) -> int:
        deadline = time.monotonic() + self._group.timeout
        client = RendezvousClient(self._loop, self._group, deadline)
        with contextlib.closing(client):
            await client.connect()
            (proven,) = client.keep()
        about = gathering.about_this_process()
        self._to_say.append({"ranks": self._ranks, **about})
        for each in (self._hear(proven), self._speak(proven), self._heed_signals()):
            self._loop.start(each)
        await event_loop.until(self._is_over, float("inf"))
        proven.stream.close()
        for process in self._started:
            # What it runs ends with it.
            process.kill()
            process.wait()
        assert self._code is not None, "or it would not be over"
        return self._code

    def _is_over(self) -> bool:
        return self._code is not None

    async def _hear(self, proven: ProvenConnection) -> None:
        try:
            while True:
                proven.stream.deadline = time.monotonic() + PATIENCE_SECONDS
                self._act(await proven.receive(MOST_BYTES))
        except (OSError, MessageError) as error:
            if self._code is None:
                _say(f"node 0 at {self._group.place} is gone: {error}")
                self._code = TRY_AGAIN

    def _act(self, told: dict[str, Any]) -> None:
        if "refused" in told:
            _say(f"error: node 0 at {self._group.place} refuses: {told['refused']}")
            self._code = TRY_AGAIN
        elif "end" in told:
            self._code = told["end"]
        elif "reach" in told:
            self._start(tunnel.dial(*told["reach"]))

    def _start(self, command: list[str]) -> None:
        here = os.getpid()
        try:
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: processes.die_with_parent(here),
            )
        except (OSError, subprocess.SubprocessError) as error:
            # Node 0 waits for it, but not for ever.
            _say(f"error: a rank cannot be started: {error}")
        else:
            self._started.append(started)

    async def _speak(self, proven: ProvenConnection) -> None:
        with contextlib.suppress(OSError):
            while True:
                while self._to_say:
                    await proven.send(self._to_say.pop(0))
                await event_loop.until(
                    lambda: bool(self._to_say), time.monotonic() + ALIVE_SECONDS
                )
                self._to_say.append({"alive": True})

    async def _heed_signals(self) -> None:
        arriving, written = socket.socketpair()
        for end in (arriving, written):
            end.setblocking(False)
        signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        for each in (*_TO_LEAVE, signal.SIGCHLD):
            # Some are ignored from the start, as by nohup.
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, lambda number, frame: None)
        while await event_loop.ready(arriving, READ, float("inf")):
            for number in map(signal.Signals, arriving.recv(_MOST_SIGNALS)):
                if number in _TO_LEAVE:
                    self._leave(number)
            self._started = [each for each in self._started if each.poll() is None]
            if self._is_leaving and not self._started:
                self._code = 0

    def _leave(self, by: signal.Signals) -> None:
        if self._is_leaving:
            # A process may get the others twice, as from a terminal that closes.
            if by == signal.SIGINT:
                self._code = 128 + by
            return
        self._is_leaving = True
        self._to_say.append({"leaves": True})
        how = ""
        if self._started:
            how = ": its ranks do so at their next commit. SIGINT ends them now"
        _say(f"this host leaves the job, since khvdrun got {by.name}{how}")


def _say(text: str) -> None:
    # Its reader may be gone.
    with contextlib.suppress(OSError):
        print(f"khvdrun: {text}", file=sys.stderr, flush=True)
