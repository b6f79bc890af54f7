"""A Ray cluster of two hosts, which are network namespaces of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import network
import pytest

DRIVER = Path(__file__).with_name("ray_driver.py")
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PORT = 6379

# The machine may be busy.
_RUN_SECONDS = 240


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


class Cluster:
    """The cluster, and drivers on its first host."""

    def __init__(self, hosts: list[network.Host]):
        self.hosts = hosts
        self.nodes: dict[int, subprocess.Popen] = {}
        for host in hosts:
            # Nodes of one machine would share it.
            host.run("mount", "-t", "tmpfs", "none", "/tmp/ray")
        for number in range(len(hosts)):
            self.start(number)

    def start(self, number: int) -> None:
        """Starts a host's node, which has two CPUs."""
        host, head = self.hosts[number], self.hosts[0].address
        options = [f"--node-ip-address={host.address}", "--num-cpus=2", "--block"]
        options += ["--object-store-memory=80000000", "--disable-usage-stats"]
        if number == 0:
            options += ["--head", f"--port={PORT}", "--include-dashboard=false"]
        else:
            options += [f"--address={head}:{PORT}"]
        node = self.nodes[number] = subprocess.Popen(
            host.command([*RAY, "start", *options]),
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = []
        for line in node.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                return
        raise RuntimeError(f"the node of {host.name} did not start: {''.join(said)}")

    def lose(self, number: int) -> None:
        """Ends all processes of a host's node at once."""
        node = self.nodes.pop(number)
        network = network_of(node.pid)
        for process in processes():
            # The host itself goes on.
            is_of_ray = b"ray" in command_of(process)
            if is_of_ray and network_of(process) == network:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        node.communicate()

    def environment(self, **variables: str) -> dict[str, str]:
        return {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_DEDUP_LOGS": "0",
            **variables,
        }

    def driver(self, scenario: str, *arguments: object) -> AbstractContextManager:
        """Starts a scenario of ray_driver.py, which ends with the context."""
        return self.program(DRIVER, scenario, *arguments)

    @contextlib.contextmanager
    def program(self, *words: object) -> Iterator[subprocess.Popen]:
        """Starts a program of Python's on the first host."""
        program = subprocess.Popen(
            self.hosts[0].command([sys.executable, *map(str, words)]),
            env=self.environment(RAY_ADDRESS=f"{self.hosts[0].address}:{PORT}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with program:
            try:
                yield program
            finally:
                program.kill()

    def run(self, scenario: str, *arguments: object) -> Any:
        """What a scenario returns."""
        with self.driver(scenario, *arguments) as driver:
            return self.returned(driver)

    def returned(self, driver: subprocess.Popen) -> Any:
        """What a driver's scenario returns."""
        printed, _ = driver.communicate(timeout=_RUN_SECONDS)
        print(printed)
        found = [line for line in printed.splitlines() if line.startswith("RETURNED ")]
        assert driver.returncode == 0 and found, printed
        return json.loads(found[-1].removeprefix("RETURNED "))

    def workers(self) -> list[int]:
        """The processes of Ray's workers that are ranks."""
        titles = b"ray::RayTrainWorker", b"ray::_Worker"
        return [each for each in processes() if command_of(each).startswith(titles)]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if why := network.unavailable():
        pytest.skip(f"there can be no hosts: {why}")
    Path("/tmp/ray").mkdir(exist_ok=True)
    with network.connected(2) as hosts, contextlib.ExitStack() as ends:
        made = Cluster.__new__(Cluster)
        ends.callback(lambda: [made.lose(number) for number in [*made.nodes]])
        made.__init__(hosts)
        yield made


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds."""

    def wait(condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    return wait
