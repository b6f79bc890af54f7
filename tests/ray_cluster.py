"""A Ray cluster of two hosts, which are network namespaces of this machine."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import network
from cluster import Cluster, command_of, kill, network_of, processes

DRIVER = Path(__file__).parent / "clusters" / "ray_driver.py"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PORT = 6379


class RayCluster(Cluster):
    """The cluster; its drivers run scenarios of ray_driver.py."""

    def __init__(self, hosts: list[network.Host]):
        super().__init__(hosts, DRIVER)
        self._token = secrets.token_hex(32)
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
                kill(process)
        node.communicate()

    def environment(self) -> dict[str, str]:
        return {
            **super().environment(),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_DEDUP_LOGS": "0",
        }

    def of_drivers(self) -> dict[str, str]:
        return {**self.environment(), "RAY_ADDRESS": f"{self.hosts[0].address}:{PORT}"}

    def workers(self) -> list[int]:
        """The processes of Ray's workers that are ranks."""
        titles = b"ray::RayTrainWorker", b"ray::_Worker"
        return [each for each in processes() if command_of(each).startswith(titles)]
