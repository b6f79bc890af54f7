"""Jobs of elastic.py, whose ranks go and come, each as its documentation says."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import environments
from jobs import KHVDRUN
from measurement import CONTENDERS, ContenderError, environment

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import network

# A job that does not go on by then is given up.
_PATIENCE_SECONDS = 180
_PORT = 29540

RANKS = 4
AGAIN_AFTER_SECONDS = 2
"""So long after its death a rank is started again: the others have gone on by then."""


class Ranks:
    """The ranks of a job, whoever they are at the time.

    Args:
        name: for messages.
        commands: of a launcher, and of ranks that it does not start, given the socket
            that ranks connect to.
        variables: environment variables, beside those of this process.

    Raises:
        OSError: a command does not start.
    """

    def __init__(
        self,
        name: str,
        commands: Callable[[str], Sequence[Sequence[object]]],
        variables: dict[str, str] | None = None,
    ):
        self.name = name
        self.version = ""
        self.processes: dict[int, int] = {}  # of each rank's number
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        path = f"{self._folder.name}/socket"
        self._output = open(f"{self._folder.name}/output", "w+b")  # noqa: SIM115
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._told: list[dict] = []
        self._started = [
            subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**environment(), **(variables or {})},
                cwd=self._folder.name,
                start_new_session=True,
            )
            for command in commands(path)
        ]

    def changed(self, size: int) -> list[dict]:
        """Waits until the job has so many ranks, and each has told of it.

        Args:
            size: how many.

        Returns:
            What each has told.

        Raises:
            ContenderError: the job has ended, or takes too long.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            found = [each for each in self._told if each["size"] == size]
            if len(found) == size:
                self._told.clear()
                return found
            for key, _ in self._selector.select(0.5):
                key.data()
            if self._started[0].poll() is not None:
                raise self._failed("has ended")
            if time.monotonic() > deadline:
                raise self._failed(f"does not become {size} ranks")

    def kill(self, number: int) -> float:
        """Kills a rank by SIGKILL; returns when that was, as the ranks tell time."""
        now = time.monotonic()
        os.kill(self.processes[number], signal.SIGKILL)
        return now

    def close(self) -> None:
        """Ends the job."""
        for each in self._started:
            each.terminate()
        for each in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(20)
            # What its launcher has left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()
        self._output.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        connected, _ = self._listener.accept()
        stream = connected.makefile("rb")
        connected.close()
        hello = json.loads(stream.readline() or "{}")
        if "version" not in hello:
            stream.close()
            return
        self.version = hello["version"]
        self.processes[hello["number"]] = hello["process"]
        self._selector.register(
            stream, selectors.EVENT_READ, lambda: self._hear(stream)
        )

    def _hear(self, stream) -> None:
        line = stream.readline()
        if line:
            self._told.append(json.loads(line))
            return
        self._selector.unregister(stream)
        stream.close()

    def _failed(self, how: str) -> ContenderError:
        self._output.seek(0)
        written = self._output.read().decode(errors="replace").strip().splitlines()
        return ContenderError("\n".join([f"{self.name} {how}", *written[-12:]]))


def on_one_host(training: str, ranks: int = RANKS, megabytes: int = 0) -> Ranks:
    """Ranks of keras_hvd on this host; one that dies is started again."""
    return Ranks(
        f"keras_hvd, {training}",
        lambda path: [
            [*KHVDRUN, "-np", ranks, "--min-np", 1, *_AGAIN]
            + [*_program(training, path), "--megabytes", megabytes]
        ],
        _QUIET,
    )


def between_hosts(training: str, hosts: Sequence[network.Host]) -> Ranks:
    """Ranks of keras_hvd on two hosts, which an agent reaches."""
    agent = network.agent(hosts, environments.KEPT / "elastic-agent")
    return Ranks(
        f"keras_hvd between hosts, {training}",
        lambda path: [
            hosts[0].command(
                [*KHVDRUN, "-np", RANKS, "--min-np", 1, *_AGAIN, "-H", _slots(hosts)]
                + ["--launch-agent", agent, *_program(training, path)]
            )
        ],
        _QUIET,
    )


def by_ssh(
    training: str, hosts: Sequence[network.Host], variables: dict[str, str]
) -> Ranks:
    """The same by ssh, whose connection ends with the cable; none is started again."""
    return Ranks(
        f"keras_hvd by ssh, {training}",
        lambda path: [
            hosts[0].command(
                [*KHVDRUN, "-np", RANKS, "--min-np", 1, "-H", _slots(hosts)]
                + _program(training, path)
            )
        ],
        {**_QUIET, **variables},
    )


def horovod() -> Ranks:
    """Ranks of Horovod, of which the last one has a host of its own by name.

    Horovod gives up all of a host with one of its ranks.
    """
    programs = environments.horovod()

    def commands(path: str) -> list[list[object]]:
        script = Path(path).with_name("discover.sh")
        script.write_text(f"#!/bin/sh\necho localhost:{RANKS - 1}\necho 127.0.0.1:1\n")
        script.chmod(0o755)
        launcher = [programs / "horovodrun", "-np", RANKS, "--min-np", RANKS - 1]
        launcher += ["--host-discovery-script", script, "--network-interfaces", "lo"]
        program = [programs / "python", CONTENDERS / "elastic_horovod.py"]
        return [[*launcher, *program, "--socket", path]]

    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return Ranks("Horovod", commands, {**_QUIET, "PATH": path})


def torchft() -> Ranks:
    """Replica groups of one rank of torchft, and their lighthouse."""
    programs = environments.torchft()
    lighthouse = [programs / "torchft_lighthouse", "--min_replicas", 1]
    lighthouse += ["--bind", f"[::]:{_PORT}"]
    rank = [programs / "python", CONTENDERS / "elastic_torchft.py"]
    return Ranks(
        "torchft",
        lambda path: [
            lighthouse,
            *([*rank, "--socket", path, "--number", number] for number in range(RANKS)),
        ],
        {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{_PORT}",
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )


_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}
_AGAIN = ["--blacklist-cooldown-range", AGAIN_AFTER_SECONDS, AGAIN_AFTER_SECONDS]


def _program(training: str, path: str) -> list[object]:
    return [
        *(sys.executable, CONTENDERS / "elastic_training.py", "--socket", path),
        *("--training", training),
        *("--timed-calls", environments.compiled("timed_calls.c")),
    ]


def _slots(hosts: Sequence[network.Host]) -> str:
    return ",".join(f"{host.address}:{RANKS // len(hosts)}" for host in hosts)
