"""Starts the contenders of hosts.py, each as its documentation says."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import environments
from jobs import KHVDRUN
from measurement import CONTENDERS, ContenderError, Job

from keras_hvd.job import cores

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import network

_PORT = 29400


@dataclass(frozen=True)
class Place:
    """Where the contenders run.

    Args:
        hosts: of a `network`.
        ranks: how many on each.
        tls: whether keras_hvd encrypts the traffic between them.
    """

    hosts: list[network.Host]
    ranks: int
    tls: bool

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ranks * len(self.hosts)

    def cores(self) -> str:
        """The cores of each rank: a share for each host, if there are enough."""
        shares = cores.shares(len(self.hosts))
        return "/".join(
            ",".join(map(str, sorted(share)))
            for share in shares
            for _ in range(self.ranks)
        )


def start(place: Place, peers: Collection[str], with_gradients: bool) -> dict[str, Job]:
    """Starts keras_hvd and these peers, by name; reports those that cannot start."""
    jobs = {"keras_hvd": keras_hvd(place, "keras_hvd_allreduce.py", _PORT)}
    if with_gradients:
        jobs["gradients"] = keras_hvd(place, "keras_hvd_gradients.py", _PORT + 100)
    others: dict[str, Callable[[Place], Job]] = {
        "keras_hvd by MPI": keras_hvd_by_mpi,
        "Open MPI": open_mpi,
        "gloo": gloo,
    }
    for name in peers:
        try:
            jobs[name] = others[name](place)
        except (environments.UnavailableError, ContenderError) as error:
            print(f"Without {name}: {error}", flush=True)
    return jobs


def keras_hvd(place: Place, script: str, port: int) -> Job:
    """A `khvdrun` on each host."""
    timed_calls = environments.compiled("timed_calls.c")
    with tempfile.NamedTemporaryFile("w", prefix="secret") as secret:
        secret.write(secrets.token_hex())
        secret.flush()
        nodes = ["--nnodes", len(place.hosts), "-np", place.ranks]
        nodes += ["--rendezvous", f"{place.hosts[0].address}:{port}"]
        nodes += ["--tls"] if place.tls else []
        cores_of_hosts = place.cores().split("/")[:: place.ranks]
        return Job(
            "keras_hvd",
            lambda path: [
                host.command(
                    ["taskset", "--cpu-list", cores_of_hosts[number]]
                    + [*KHVDRUN, *nodes, "--node-rank", number, sys.executable]
                    + [CONTENDERS / script, "--socket", path]
                    + ["--timed-calls", timed_calls]
                )
                for number, host in enumerate(place.hosts)
            ],
            place.size,
            {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_HVD_SECRET_FILE": secret.name},
        )


def keras_hvd_by_mpi(place: Place) -> Job:
    """keras_hvd's ranks, whose tensors Open MPI carries."""
    if place.tls:
        raise environments.UnavailableError("nothing encrypts what MPI carries")
    libraries = environments.openmpi().parent / "lib"
    told = {
        "KERAS_HVD_CPU_OPERATIONS": "mpi",
        "LD_LIBRARY_PATH": str(libraries),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    words: list[str | Path] = []
    for name, value in told.items():
        words += ["-x", f"{name}={value}"]
    words += [sys.executable, CONTENDERS / "keras_hvd_allreduce.py"]
    return _mpirun("keras_hvd by MPI", place, words)


def open_mpi(place: Place) -> Job:
    """Open MPI's ranks over TCP."""
    python = environments.openmpi() / "python"
    return _mpirun("Open MPI", place, [python, CONTENDERS / "mpi_allreduce.py"])


def _mpirun(name: str, place: Place, words: list[str | Path]) -> Job:
    """Ranks of Open MPI over TCP; a script of ours is its way to other hosts."""
    programs = environments.openmpi()
    agent = network.agent(place.hosts, environments.KEPT / "agent")
    slots = ",".join(f"{host.address}:{place.ranks}" for host in place.hosts)
    launcher: list[str | Path] = [programs / "mpirun", "--bind-to", "none"]
    launcher += ["--host", slots, "--map-by", "slot", "-n", str(place.size)]
    launcher += ["--prtemca", "plm_ssh_agent", agent]
    launcher += ["--prtemca", "prte_if_include", "cable"]
    launcher += ["--mca", "btl_tcp_if_include", "cable", "--mca", "pml", "ob1"]
    launcher += ["--mca", "btl", "tcp,self,sm"]
    for variable in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        os.environ[variable] = "1"
    timed_calls = environments.compiled("timed_calls.c")
    return Job(
        name,
        lambda path: [
            place.hosts[0].command(
                [*launcher, *words, "--socket", path, "--cores", place.cores()]
                + ["--timed-calls", timed_calls]
            )
        ],
        place.size,
    )


def gloo(place: Place) -> Job:
    """torch.distributed's ranks, with gloo."""
    python = environments.torch() / "python"
    return Job(
        "gloo",
        lambda path: [
            place.hosts[rank // place.ranks].command(
                [python, CONTENDERS / "gloo_allreduce.py", "--socket", path]
                + ["--cores", place.cores(), "--meeting", f"{path}-of-gloo"]
                + ["--rank", rank, "--size", place.size]
            )
            for rank in range(place.size)
        ],
        place.size,
        {"GLOO_SOCKET_IFNAME": "cable"},
    )
