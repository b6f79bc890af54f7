"""Open MPI's and MPICH's `mpirun`, and launchers of MPIs with their interfaces."""

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
    """That by which the ranks meet: mpi4py is built for it."""

    sign: str
    """A variable that no other program sets."""

    names: Names
    job: Callable[[Mapping[str, str]], str]
    """A name that all ranks of a job on this host share; "" if there is none."""

    def is_here(self, variables: Mapping[str, str]) -> bool:
        return self.sign in variables

    def world(self, variables: Mapping[str, str]) -> World:
        """The place in a job on one host, or the way to meet ranks of other hosts."""
        rendezvous = variables.get(RENDEZVOUS) or None
        is_alone = rendezvous is None and is_one_host(variables, self.names)
        if is_alone and (job := self.job(variables)):
            return on_one_host(variables, self.names, job)
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
    "Open MPI", "OMPI_COMM_WORLD_RANK", beginning("OMPI_COMM_WORLD_"), _open_mpi_job
)
MPICH = Mpirun(
    "MPICH",
    "MPI_LOCALRANKID",
    Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _mpich_job,
)
# Cray's, as on HPE's machines. Its MPI has MPICH's interface.
PALS = Mpirun(
    "MPICH",
    "PALS_RANKID",
    Names("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    lambda variables: _named("pals", variables, "PALS_APID"),
)
# That of MVAPICH2, which has MPICH's interface too.
MPIRUN_RSH = Mpirun(
    "MPICH", "MV2_COMM_WORLD_RANK", beginning("MV2_COMM_WORLD_"), lambda variables: ""
)
# LSF's. Its MPI is made of Open MPI.
JSRUN = Mpirun(
    "Open MPI",
    "JSM_NAMESPACE_RANK",
    beginning("JSM_NAMESPACE_"),
    lambda variables: _named("jsrun", variables, "PMIX_NAMESPACE"),
)


def _named(launcher: str, variables: Mapping[str, str], name: str) -> str:
    """The job's name by this variable, if that is set."""
    return f"{launcher}-{variables[name]}" if variables.get(name) else ""
