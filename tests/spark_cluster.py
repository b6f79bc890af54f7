"""A standalone cluster of Spark on three hosts: a master, and two workers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import network
from cluster import Cluster

DRIVER = Path(__file__).parent / "clusters" / "spark_driver.py"
PORT, CONNECT_PORT = 7077, 15002
_START_SECONDS = 120


class Session:
    """A driver with a session, which runs one scenario after the other."""

    def __init__(self, kind: str, process: subprocess.Popen):
        self.kind = kind
        self.process = process

    def run(self, scenario: str, *arguments: object) -> Any:
        """What a scenario returns."""
        self.start(scenario, *arguments)
        return self.returned()

    def start(self, scenario: str, *arguments: object) -> None:
        self.process.stdin.write(json.dumps([scenario, *arguments]) + "\n")
        self.process.stdin.flush()

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        # The process itself is that of `nsenter`'s successor.
        self.process.send_signal(signal.SIGINT)

    def returned(self) -> Any:
        """What the scenario that was started last returns."""
        printed = []
        for line in self.process.stdout:
            if line.startswith("RAISED "):
                raise AssertionError(json.loads(line.removeprefix("RAISED ")))
            if line.startswith("RETURNED "):
                return json.loads(line.removeprefix("RETURNED "))
            printed.append(line)
        raise AssertionError("".join(printed))


class SparkCluster(Cluster):
    """The cluster: drivers run on the master's host, two ranks on each of the others.

    `ends` ends it.
    """

    def __init__(
        self, hosts: list[network.Host], folder: Path, ends: contextlib.ExitStack
    ):
        super().__init__(hosts, DRIVER)
        self.folder = folder
        self._ends = ends
        self.master = f"spark://{hosts[0].address}:{PORT}"
        of_master = ["--host", hosts[0].address, "--port", str(PORT)]
        self._start(0, "Master", [*of_master, "--webui-port", "0"], "New state: ALIVE")
        of_worker = ["--cores", "2", "--memory", "1500m", "--webui-port", "0"]
        for number in range(1, len(hosts)):
            options = ["--host", hosts[number].address, *of_worker, self.master]
            self._start(number, "Worker", options, "Successfully registered")

    def _start(self, number: int, role: str, options: list[str], ready: str) -> None:
        words = [f"org.apache.spark.deploy.{role.lower()}.{role}", *options]
        self._ends.enter_context(self._running(number, role, words, ready))

    @contextlib.contextmanager
    def _running(
        self, number: int, name: str, words: list[str], ready: str
    ) -> Iterator[None]:
        """A program of Spark's on a host, from when it is ready."""
        home = Path(importlib.util.find_spec("pyspark").origin).parent
        log = self.folder / f"{name}-{number}.log"
        with log.open("w") as output:
            node = subprocess.Popen(
                self.hosts[number].command([home / "bin" / "spark-class", *words]),
                env={**self.environment(), **self._of_host(number)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            deadline = time.monotonic() + _START_SECONDS
            while ready not in log.read_text():
                assert node.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield
        finally:
            node.terminate()
            node.wait()

    def _of_host(self, number: int) -> dict[str, str]:
        address = self.hosts[number].address
        own = str(self.folder / f"host-{number}")
        return {
            "SPARK_LOCAL_IP": address,
            "SPARK_LOCAL_HOSTNAME": address,
            "SPARK_WORKER_DIR": own,
            "SPARK_LOCAL_DIRS": own,
        }

    def environment(self) -> dict[str, str]:
        return {
            **super().environment(),
            "SPARK_DAEMON_MEMORY": "600m",
            "PYSPARK_PYTHON": sys.executable,
        }

    def of_drivers(self) -> dict[str, str]:
        return {
            **self.environment(),
            **self._of_host(0),
            "CLUSTER": self.master,
            "SERVER": f"sc://{self.hosts[0].address}:{CONNECT_PORT}",
            "SETTINGS": json.dumps(self._settings()),
        }

    def _settings(self) -> dict[str, str]:
        return {
            "spark.ui.enabled": "false",
            "spark.executor.memory": "1g",
            "spark.driver.host": self.hosts[0].address,
            "spark.log.level": "ERROR",
        }

    @contextlib.contextmanager
    def session(self, kind: str, **variables: str) -> Iterator[Session]:
        """A driver with a session: "classic", or "connect", which has a server."""
        with contextlib.ExitStack() as ends:
            if kind == "connect":
                ends.enter_context(self._connect_server())
            process = ends.enter_context(
                self.program(self._scenarios, kind, **variables)
            )
            yield Session(kind, process)

    def _connect_server(self) -> AbstractContextManager[None]:
        settings = {
            **self._settings(),
            "spark.connect.grpc.binding.address": self.hosts[0].address,
            "spark.connect.grpc.binding.port": str(CONNECT_PORT),
            "spark.log.level": "INFO",
        }
        name = "org.apache.spark.sql.connect.service.SparkConnectServer"
        words = ["org.apache.spark.deploy.SparkSubmit", "--master", self.master]
        for key, value in settings.items():
            words += ["--conf", f"{key}={value}"]
        words += ["--class", name, "spark-internal"]
        return self._running(0, "Connect", words, "Spark Connect server started at")
