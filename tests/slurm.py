"""A Slurm cluster whose nodes are hosts of tests/network.py, with MUNGE.

The daemons are real. They end, with their processes, when the context does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import network

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
_LATEST_SECONDS = 90
# Slurm places as many tasks as it is told, on any machine.
_CORES_PER_NODE = 4


@dataclass
class Cluster:
    """A cluster of several nodes.

    Args:
        hosts: its nodes, from which jobs can be started.
        folder: where it keeps its files.
    """

    hosts: Sequence[network.Host]
    folder: Path

    def environment(self) -> dict[str, str]:
        """The environment of programs that talk to it."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *words: str | Path) -> list[str]:
        """The command line that runs one of Slurm's programs on the first node."""
        return self.hosts[0].command(words)

    def start(
        self, *words: str | Path, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen:
        """Starts one of Slurm's programs on the first node."""
        return subprocess.Popen(
            self.command(*words),
            env={**self.environment(), **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess:
        """Runs one of Slurm's programs on the first node, for at most a minute."""
        with self.start(*words, variables=variables) as process:
            try:
                out, err = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.terminate()
                out, err = process.communicate()
                raise AssertionError(f"{words} did not end:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(words, process.returncode, out, err)


def unavailable() -> str:
    """Why there can be no such cluster here; "" if there can."""
    missing = [each for each in _PROGRAMS if shutil.which(each) is None]
    if missing:
        return f"{missing[0]} is not installed"
    return network.unavailable()


@contextlib.contextmanager
def cluster(nodes: int, folder: Path) -> Iterator[Cluster]:
    """A cluster of `nodes` nodes, within the context."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(network.connected(nodes))
        _configure(hosts, folder)
        munge = stack.enter_context(_munge(folder))
        for host in hosts:
            # Each knows the others by name, and finds MUNGE where its library looks.
            host.run("mkdir", "-p", "/run/munge")
            host.run("mount", "--bind", str(munge), "/run/munge")
            host.run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
        configuration = ("-f", str(folder / "slurm.conf"))
        daemons = [(hosts[0], "slurmctld", ["-D", "-i", *configuration])]
        daemons += [
            (host, "slurmd", ["-D", "-N", host.name, *configuration]) for host in hosts
        ]
        for host, program, options in daemons:
            output = stack.enter_context(
                (folder / f"{program}-{host.name}.txt").open("w")
            )
            daemon = stack.enter_context(
                subprocess.Popen(
                    host.command([program, *options]), stdout=output, stderr=output
                )
            )
            stack.callback(daemon.terminate)
        made = Cluster(hosts, folder)
        _await_nodes(made)
        try:
            yield made
        finally:
            # Its steps would outlive the daemons.
            made.run("scancel", "--quiet", "--user", "root")


def _configure(hosts: Sequence[network.Host], folder: Path) -> None:
    (folder / "state").mkdir()
    lines = [
        "ClusterName=tests",
        f"SlurmctldHost={hosts[0].name}({hosts[0].address})",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/%n.pid",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SlurmdParameters=config_overrides",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        # How often it places the parts of heterogeneous jobs: else twice a minute.
        "SchedulerParameters=bf_interval=1",
        "PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:4",
    ]
    lines += [
        f"NodeName={host.name} NodeAddr={host.address} CPUs={_CORES_PER_NODE}"
        for host in hosts
    ]
    (folder / "slurm.conf").write_text("\n".join([*lines, ""]))
    names = ["127.0.0.1 localhost", *(f"{h.address} {h.name}" for h in hosts)]
    (folder / "hosts").write_text("\n".join([*names, ""]))


@contextlib.contextmanager
def _munge(folder: Path) -> Iterator[Path]:
    """Runs MUNGE; yields the folder of its socket."""
    place = folder / "munge"
    place.mkdir()
    key = place / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    path = place / "munge.socket.2"
    command = ["munged", "--foreground", "--force", f"--socket={path}"]
    command += [f"--key-file={key}", f"--pid-file={place}/pid"]
    command += [f"--log-file={place}/log", f"--seed-file={place}/seed"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as daemon:
        try:
            _await(lambda: _accepts(path), "munged", place / "log")
            yield place
        finally:
            daemon.terminate()


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connected:
        return connected.connect_ex(str(path)) == 0


def _await_nodes(made: Cluster) -> None:
    def are_idle() -> bool:
        shown = made.run("sinfo", "--noheader", "--Node", "--format=%T")
        return shown.stdout.split() == ["idle"] * len(made.hosts)

    _await(are_idle, "the nodes", made.folder / f"slurmctld-{made.hosts[0].name}.txt")


def _await(condition, what: str, log: Path) -> None:
    deadline = time.monotonic() + _LATEST_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not start:\n{log.read_text()}")
        time.sleep(0.05)
