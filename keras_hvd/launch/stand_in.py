"""Stands in for a rank on another host: `khvdrun` treats it as that rank.

It starts `remote_rank` there by ssh, writes what the rank writes, passes on signals and
what the rank and `khvdrun` say to each other, and ends as the rank ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from keras_hvd.launch import processes
from keras_hvd.launch.frames import Frames, Kind
from keras_hvd.launch.job import FORWARDED
from keras_hvd.launch.other_launchers import travels
from keras_hvd.version import __version__
from keras_hvd.world import renewal
from keras_hvd.world.rendezvous import secret

SSH = (
    *("ssh", "-o", "BatchMode=yes"),
    *("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=4"),
    *("-o", "ConnectTimeout=30"),
)
"""It asks nothing, and tells within five seconds that a host is gone."""

_PASSED_ON = {*FORWARDED, signal.SIGTSTP, signal.SIGCONT}
_CHUNK_BYTES = 1 << 16
# Without a word from the host. ssh itself, as it is started here, notices sooner.
_PATIENCE_SECONDS = 15.0
# ssh's own exit code, for hosts that it cannot reach.
_UNREACHABLE = 255


def command(told: dict[str, Any], of_rank: Sequence[str]) -> list[str]:
    """The command line that stands in for a rank.

    Args:
        told: `host`; `agent`, which is a command that runs another one there, as ssh
            does; `has_secret`, whether the host has the ranks' secret; and of the rank
            `ranks_here`, `local_rank`, `is_bound` and `interfaces`.
        of_rank: its own command line.
    """
    program = [sys.executable, "-m", "keras_hvd.launch.stand_in"]
    return [*program, json.dumps(told), *of_rank]


class StandIn:
    """One end of a connection with a host, and one with `khvdrun`."""

    def __init__(self, told: dict[str, Any]):
        self._agent: Sequence[str] = told.pop("agent")
        self._host: str = told["host"]
        self._told = told
        self._frames: Frames
        self._words: socket.socket | None = None
        self.has_begun = False
        """Whether the other host has been asked to start the rank."""

    def run(self) -> int:
        """Returns the rank's wait status. Raises EOFError."""
        here = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        threading.Thread(target=self._pass_on_signals, daemon=True).start()

        def prepare() -> None:
            processes.die_with_parent(here)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)

        agent = subprocess.Popen(
            [*self._agent, self._host, _remote_command()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Signals for the rank do not end it.
            start_new_session=True,
            preexec_fn=prepare,
        )
        assert agent.stdin is not None and agent.stdout is not None
        self._frames = Frames(
            agent.stdout.fileno(), agent.stdin.fileno(), _PATIENCE_SECONDS
        )
        os.write(2, self._frames.await_greeting())
        self._begin()
        while True:
            kind, content = self._frames.receive()
            if kind == Kind.ENDED:
                return int(content)
            self._act(kind, content)

    def _begin(self) -> None:
        _, version = self._frames.receive()
        if version.decode() != __version__:
            raise ValueError(
                f"{self._host} has keras_hvd {version.decode()}, and this host "
                f"{__version__}: install the same on all hosts"
            )
        place = renewal.of(os.environ)
        assert place is not None, "khvdrun has set it"
        # Ranks of a host must not hear each other's words.
        self._name = place.name
        name = f"{place.name}.{place.number}.{os.getpid()}"
        own = {**vars(place), "name": name}
        variables = {name: os.environ[name] for name in os.environ if travels(name)}
        if self._told.pop("has_secret"):
            for name in (secret.VARIABLE, secret.FILE_VARIABLE):
                variables.pop(name, None)
        told = {
            **self._told,
            "directory": os.getcwd(),
            "variables": variables,
            "renewal": own,
        }
        self._frames.send(Kind.BEGIN, json.dumps(told).encode())
        self._frames.show_life()
        self.has_begun = True

    def _pass_on_signals(self) -> None:
        while True:
            number = signal.sigwait(_PASSED_ON)
            if not self.has_begun:
                os._exit(128 + number)
            if number == signal.SIGTSTP:
                # The rank's session has no terminal, whose stops it would heed.
                number = signal.SIGSTOP
            with contextlib.suppress(OSError):
                self._frames.send(Kind.SIGNAL, str(int(number)).encode())

    def _act(self, kind: Kind, content: bytes) -> None:
        if kind in (Kind.STDOUT, Kind.STDERR):
            descriptor = 1 if kind == Kind.STDOUT else 2
            while content:
                content = content[os.write(descriptor, content) :]
        elif kind == Kind.CONNECTED:
            self._words = renewal.dial(self._name)
            threading.Thread(
                target=self._pass_on_words, args=[self._words], daemon=True
            ).start()
        elif kind == Kind.WORDS and self._words is not None:
            # khvdrun may have ended it.
            with contextlib.suppress(OSError):
                self._words.sendall(content)
        elif kind == Kind.CLOSED and self._words is not None:
            # Its thread then does not take it for khvdrun's end of it.
            ended, self._words = self._words, None
            with contextlib.suppress(OSError):
                ended.shutdown(socket.SHUT_RDWR)

    def _pass_on_words(self, words: socket.socket) -> None:
        with words, contextlib.suppress(OSError):
            while content := words.recv(_CHUNK_BYTES):
                self._frames.send(Kind.WORDS, content)
        if self._words is words:
            self._frames.send(Kind.CLOSED)


def _remote_command() -> str:
    """What a shell on the other host runs."""
    program = [sys.executable, "-m", "keras_hvd.launch.remote_rank"]
    path = os.environ.get("PYTHONPATH")
    if path is not None:
        program = ["env", f"PYTHONPATH={path}", *program]
    return shlex.join(program)


def _end_like(status: int) -> int:
    """Ends this process as another one has ended, or returns its exit code."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # Its core is on its own host.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            # SIGKILL has no handler.
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        signal.pthread_kill(threading.get_ident(), -code)
    return code


def main(told: dict[str, Any]) -> int:
    """Stands in for a rank, and returns its exit code."""
    stand_in = StandIn(told)
    try:
        status = stand_in.run()
    except EOFError:
        what = "is not connected any more" if stand_in.has_begun else "starts no rank"
        print(f"khvdrun: {told['host']} {what}", file=sys.stderr)
        return _UNREACHABLE
    except (OSError, ValueError) as error:
        print(f"khvdrun: {error}", file=sys.stderr)
        return _UNREACHABLE
    return _end_like(status)


if __name__ == "__main__":
    sys.exit(main({**json.loads(sys.argv[1]), "command": sys.argv[2:]}))
