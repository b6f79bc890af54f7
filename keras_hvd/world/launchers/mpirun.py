"""Open MPI's and MPICH's `mpirun`, on one host or several."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from keras_hvd.world.launchers.launcher import LaunchEnvironmentError, World
from keras_hvd.world.launchers.mpi import ByMpi
from keras_hvd.world.launchers.variables import (
    RENDEZVOUS,
    Names,
    beginning,
    is_one_host,
    on_any_hosts,
    on_one_host,
    text_of,
)

# MPICH sets no id of the job. One of these processes serves the job's ranks on a host.
_HYDRA_PARENTS = (
    "hydra_pmi_proxy",
    "pmi_proxy",
    "mpiexec.hydra",
    "mpiexec.gforker",
    "mpiexec",
    "mpirun",
)


@dataclass(frozen=True)
class Mpirun:
    """The mpirun of one family of MPIs.

    >>> MPICH.is_here({"MPI_LOCALRANKID": "0"})
    True
    """

    mpi: str
    sign: str
    """A variable that no other program sets."""

    names: Names
    job: Callable[[Mapping[str, str]], str]
    """A name that all ranks of a job on this host share."""

    def is_here(self, variables: Mapping[str, str]) -> bool:
        return self.sign in variables

    def world(self, variables: Mapping[str, str]) -> World:
        """The place in a job on one host, or the way to meet ranks of other hosts."""
        rendezvous = variables.get(RENDEZVOUS) or None
        if rendezvous is None and is_one_host(variables, self.names):
            return on_one_host(variables, self.names, self.job(variables))
        # The hosts do not know a common name of the job.
        world = on_any_hosts(variables, self.names, "", rendezvous)
        return world if rendezvous else dataclasses.replace(world, way=ByMpi(self.mpi))


def _open_mpi_job(variables: Mapping[str, str]) -> str:
    # The namespace of Open MPI 4 is a hash of 16 bits; this key is random.
    key = variables.get("OMPI_MCA_orte_precondition_transports")
    namespace = text_of(variables, "PMIX_NAMESPACE")
    return "-".join(("openmpi", namespace, key) if key else ("openmpi", namespace))


def _mpich_job(variables: Mapping[str, str]) -> str:
    """A name that all ranks of an MPICH job on this host share."""
    process = os.getppid()
    while process > 1:
        try:
            status = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            # A hidden process is another user's, and so no such ancestor.
            break
        # The name is in parentheses and may contain parentheses.
        name, _, fields = status.partition("(")[2].rpartition(")")
        parent, started = fields.split()[1], fields.split()[19]
        if name in _HYDRA_PARENTS:
            return f"mpich-{process}-{started}"
        process = int(parent)
    raise LaunchEnvironmentError(
        "MPI_LOCALRANKID is set, as MPICH's mpiexec sets it, but no ancestor of this "
        f"process is one of {', '.join(_HYDRA_PARENTS)}: unset MPI_LOCALRANKID, or "
        "start the program with khvdrun."
    )


OPEN_MPI = Mpirun(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    beginning("OMPI_COMM_WORLD_"),
    _open_mpi_job,
)
MPICH = Mpirun(
    "MPICH",
    "MPI_LOCALRANKID",
    Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _mpich_job,
)
