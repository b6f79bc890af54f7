"""What the clusters of these tests have in common: hosts, and drivers on the first."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import network

# The machine may be busy.
_RUN_SECONDS = 600


def processes() -> list[int]:
    return [int(each.name) for each in Path("/proc").glob("[0-9]*")]


def network_of(process: int) -> str:
    """The network that a process is in; "" if it has ended."""
    try:
        return os.readlink(f"/proc/{process}/ns/net")
    except OSError:
        return ""


def command_of(process: int) -> bytes:
    """A process' command line; b"" if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def is_alive(process: int) -> bool:
    """Whether a process has not ended, or is not waited for."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Cluster:
    """Hosts, of which the first starts scenarios of a program."""

    def __init__(self, hosts: list[network.Host], scenarios: Path):
        self.hosts = hosts
        self._scenarios = scenarios

    def environment(self) -> dict[str, str]:
        """The variables of nodes."""
        return {**os.environ}

    def of_drivers(self) -> dict[str, str]:
        """The variables of drivers."""
        return self.environment()

    def driver(
        self, scenario: str, *arguments: object, **variables: str
    ) -> AbstractContextManager[subprocess.Popen]:
        """Starts a scenario, which ends with the context."""
        return self.program(self._scenarios, scenario, *arguments, **variables)

    @contextlib.contextmanager
    def program(self, *words: object, **variables: str) -> Iterator[subprocess.Popen]:
        """Starts a program of Python's on the first host."""
        program = subprocess.Popen(
            self.hosts[0].command([sys.executable, *map(str, words)]),
            env={**self.of_drivers(), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            stdin=subprocess.PIPE,
        )
        with program:
            try:
                yield program
            finally:
                program.kill()

    def run(self, scenario: str, *arguments: object, **variables: str) -> Any:
        """What a scenario returns."""
        with self.driver(scenario, *arguments, **variables) as driver:
            return self.returned(driver)

    def returned(self, driver: subprocess.Popen) -> Any:
        """What a driver's scenario returns."""
        printed, _ = driver.communicate(timeout=_RUN_SECONDS)
        print(printed)
        found = [line for line in printed.splitlines() if line.startswith("RETURNED ")]
        assert driver.returncode == 0 and found, printed
        return json.loads(found[-1].removeprefix("RETURNED "))
