"""Starts a rank for the `khvdrun` of another host, and speaks for it.

`khvdrun` reaches this program by ssh, and both speak in frames over its standard input
and output. When ssh ends, its input does: then the rank is killed, and everything that
it has started.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from keras_hvd.backends.current import allocator
from keras_hvd.exceptions import RendezvousError
from keras_hvd.job import cores
from keras_hvd.launch import processes, rank
from keras_hvd.launch.frames import Frames, Kind
from keras_hvd.version import __version__
from keras_hvd.world import renewal
from keras_hvd.world.launchers.variables import RENDEZVOUS
from keras_hvd.world.rendezvous import network_interfaces, secret, unix_socket

_CHUNK_BYTES = 1 << 16
_CANNOT_EXECUTE = 127 << 8  # a wait status

# Without a word from khvdrun, on a host that is cut off from it.
_PATIENCE_SECONDS = 60.0

# From SIGTERM to SIGKILL, for what the rank has left.
_LEFT_SECONDS = 5.0


class RemoteRank:
    """The rank, from its start until nothing of it is left.

    Args:
        frames: the other end is `khvdrun`'s.
        told: the command, its variables and folder, and its place on this host.
    """

    def __init__(self, frames: Frames, told: dict[str, Any]):
        self._frames = frames
        self._told = told
        self._process = 0
        self._words: socket.socket | None = None

    def run(self) -> None:
        """Returns once it has ended. Raises OSError."""
        processes.adopt_orphans()
        callers = renewal.listen(self._told["renewal"]["name"])
        outputs = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        status = self._start(*(write_end for _, write_end in outputs))
        pumps = [
            _in_thread(self._pump, read_end, kind)
            for (read_end, _), kind in zip(outputs, (Kind.STDOUT, Kind.STDERR))
        ]
        _in_thread(self._hear)
        _in_thread(self._pass_on_words, callers)
        if status is None:
            status = self._await_end()
        for each in pumps:
            each.join()
        self._frames.send(Kind.ENDED, str(status).encode())

    def _start(self, stdout: int, stderr: int) -> int | None:
        """Returns a wait status if it cannot be started."""
        told, here = self._told, self._told["ranks_here"]
        given = {**os.environ, **told["variables"]}
        variables = {
            **cores.thread_variables(here),
            **given,
            **allocator.variables(given),
            **renewal.Renewal(**told["renewal"]).variables(),
        }
        command = told["command"]
        bound = None
        if told["is_bound"]:
            # The host may have had more slots before.
            bound = cores.shares(here)[told["local_rank"] % here]
        try:
            os.chdir(told["directory"])
            executable = shutil.which(command[0], path=variables.get("PATH"))
            if executable is None:
                raise FileNotFoundError(0, "command not found")
            self._process = rank.spawn(
                *(command, executable, variables, bound),
                (subprocess.DEVNULL, stdout, stderr),
            )
        except OSError as error:
            what = f"execute {command[0]!r} in {told['directory']!r}"
            text = f"khvdrun: {told['host']} cannot {what}: {error.strerror}\n"
            self._frames.send(Kind.STDERR, text.encode())
            return _CANNOT_EXECUTE
        finally:
            os.close(stdout)
            os.close(stderr)
        return None

    def _await_end(self) -> int:
        """Returns its wait status, once all that it has started has ended too."""
        status = 0
        kill = functools.partial(processes.signal_descendants, signal.SIGKILL)
        while True:
            try:
                process, ended_with = os.waitpid(-1, 0)
            except ChildProcessError:
                return status
            if process == self._process:
                status, self._process = ended_with, 0
                processes.signal_descendants(signal.SIGTERM)
                later = threading.Timer(_LEFT_SECONDS, kill)
                later.daemon = True
                later.start()

    def _pump(self, read_end: int, kind: Kind) -> None:
        # Without khvdrun, everything ends anyway.
        with contextlib.suppress(OSError):
            while content := os.read(read_end, _CHUNK_BYTES):
                self._frames.send(kind, content)

    def _hear(self) -> None:
        """Does as `khvdrun` says, to its end."""
        try:
            while True:
                kind, content = self._frames.receive()
                # The rank may have ended, or what it ran.
                with contextlib.suppress(OSError):
                    self._act(kind, content)
        except (EOFError, OSError, ValueError):
            # No other thread may wait for what is being killed.
            processes.signal_descendants(signal.SIGKILL)
            os._exit(1)

    def _act(self, kind: Kind, content: bytes) -> None:
        words = self._words
        if kind == Kind.SIGNAL and self._process:
            os.killpg(self._process, int(content))
        elif kind == Kind.WORDS and words is not None:
            words.sendall(content)
        elif kind == Kind.CLOSED and words is not None:
            words.shutdown(socket.SHUT_RDWR)

    def _pass_on_words(self, callers: socket.socket) -> None:
        """Connects the rank with its `khvdrun`, as often as it wants."""
        callers.setblocking(True)
        while True:
            words, _ = callers.accept()
            # Without khvdrun, everything ends anyway.
            with words, contextlib.suppress(OSError):
                if not unix_socket.is_own(words):
                    continue
                self._words = words
                self._frames.send(Kind.CONNECTED)
                while content := _received(words):
                    self._frames.send(Kind.WORDS, content)
                self._words = None
                self._frames.send(Kind.CLOSED)


def _in_thread(act: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=act, args=arguments, daemon=True)
    thread.start()
    return thread


def _received(words: socket.socket) -> bytes:
    try:
        return words.recv(_CHUNK_BYTES)
    except OSError:
        return b""


def main() -> None:
    """Runs a rank as `khvdrun` says, or ends with it."""
    frames = Frames(0, os.dup(1), _PATIENCE_SECONDS)
    # The rank's output, and this program's, must not come between messages.
    os.dup2(2, 1)
    try:
        frames.greet()
        frames.send(Kind.VERSION, __version__.encode())
        kind, content = frames.receive()
    except (EOFError, BrokenPipeError):
        # It wants this rank no more.
        return
    assert kind == Kind.BEGIN, kind
    frames.show_life()
    told = json.loads(content)
    of_login = {RENDEZVOUS}
    if secret.VARIABLE in told["variables"]:
        of_login |= {secret.VARIABLE, secret.FILE_VARIABLE}
    for name in of_login:
        # For other jobs.
        os.environ.pop(name, None)
    # ssh tells at which address it has reached this host.
    names = [*os.environ.get("SSH_CONNECTION", "").split()[2:3], told["host"]]
    try:
        address = network_interfaces.reached_as(names, told["interfaces"])
    except RendezvousError as error:
        sys.exit(f"khvdrun: {told['host']}: {error}")
    told["renewal"]["address"] = address
    RemoteRank(frames, told).run()


if __name__ == "__main__":
    main()
