"""Finds this process' rank and its job's size in the variables that its launcher set.

`khvdrun`, Open MPI's and MPICH's `mpirun`, Slurm's `srun` and Horovod's `horovodrun`
(with Gloo) each use their own variables. Without any of them, the process is a world of
size 1.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from keras_hvd.exceptions import KerasHvdError

# MPICH sets no id of the job. One of these processes serves the job's ranks on a host.
_HYDRA_PARENTS = (
    "hydra_pmi_proxy",
    "pmi_proxy",
    "mpiexec.hydra",
    "mpiexec.gforker",
    "mpiexec",
    "mpirun",
)

# Slurm numbers steps that do not launch ranks (batch scripts, interactive shells) from
# the top of 32 bits downwards.
_FIRST_RESERVED_SLURM_STEP = 0xFFFFFFF0

# The engine's limit: the name is part of a socket's address.
_LONGEST_JOB_NAME = 80

# The engine's numbers of ranks have 32 bits.
_TOO_MANY_RANKS = 2**31


class LaunchEnvironmentError(KerasHvdError):
    """The launcher's variables are malformed, contradictory or unsupported."""


@dataclass(frozen=True)
class World:
    """This process' place in its job.

    Args:
        rank: Number of this process in the job, from 0.
        size: Number of processes in the job.
        local_rank: Number of this process among those of the job on this host, from 0.
        local_size: Number of processes of the job on this host.
        cross_rank: Number of this host in the job, from 0.
        cross_size: Number of hosts in the job.
        job: A name that no other running job on this host has.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    job: str


def world(environment: Mapping[str, str] | None = None) -> World:
    """Returns the rank, size and job that this process was launched with.

    Args:
        environment: The variables to read; by default those of this process.

    Returns:
        The `World` that `khvdrun`, else `mpirun`, else `horovodrun`, else `srun`
        described. Without any of them, a world of size 1 with a new job of its own.

    Raises:
        LaunchEnvironmentError: A variable is missing, malformed or contradicts another
            one, or the job spans more than one host.

    Example:
        >>> from keras_hvd import environment
        >>> environment.world({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0",
        ...     "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        ...     "PMIX_NAMESPACE": "1891500033"})  # doctest: +NORMALIZE_WHITESPACE
        World(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1,
            job='openmpi-1891500033')
    """
    variables = os.environ if environment is None else environment
    launched_by: tuple[tuple[str, Callable[[Mapping[str, str]], World]], ...] = (
        ("KERAS_HVD_RANK", _from_khvdrun),
        ("OMPI_COMM_WORLD_RANK", _from_open_mpi),
        ("MPI_LOCALRANKID", _from_mpich),
        ("HOROVOD_RANK", _from_horovodrun),
    )
    for variable, read in launched_by:
        if variable in variables:
            return read(variables)
    if _inside_srun(variables):
        return _from_srun(variables)
    return World(0, 1, 0, 1, 0, 1, f"single-{os.getpid()}-{uuid.uuid4().hex[:16]}")


def _from_khvdrun(variables: Mapping[str, str]) -> World:
    prefix = "KERAS_HVD_"
    hosts = _integer(variables, prefix + "CROSS_SIZE", 1)
    if hosts > 1:
        raise _many_hosts(f"{prefix}CROSS_SIZE={hosts}")
    _integer(variables, prefix + "CROSS_RANK", 0, hosts)
    return _checked(
        variables,
        rank=prefix + "RANK",
        size=prefix + "SIZE",
        local_rank=prefix + "LOCAL_RANK",
        local_size=prefix + "LOCAL_SIZE",
        job=_text(variables, prefix + "JOB"),
    )


def _from_open_mpi(variables: Mapping[str, str]) -> World:
    # The namespace of Open MPI 4 is a hash of 16 bits; this key is random.
    key = variables.get("OMPI_MCA_orte_precondition_transports")
    namespace = _text(variables, "PMIX_NAMESPACE")
    prefix = "OMPI_COMM_WORLD_"
    return _checked(
        variables,
        rank=prefix + "RANK",
        size=prefix + "SIZE",
        local_rank=prefix + "LOCAL_RANK",
        local_size=prefix + "LOCAL_SIZE",
        job="-".join(("openmpi", namespace, key) if key else ("openmpi", namespace)),
    )


def _from_mpich(variables: Mapping[str, str]) -> World:
    return _checked(
        variables,
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        job=f"mpich-{_hydra_job()}",
    )


def _from_horovodrun(variables: Mapping[str, str]) -> World:
    hosts = _integer(variables, "HOROVOD_CROSS_SIZE", 1)
    if hosts > 1:
        raise _many_hosts(f"HOROVOD_CROSS_SIZE={hosts}")
    # The launcher listens at this address as long as the job runs.
    address = _text(variables, "HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = _text(variables, "HOROVOD_GLOO_RENDEZVOUS_PORT")
    return _checked(
        variables,
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
        job=f"horovodrun-{address}-{port}",
    )


def _from_srun(variables: Mapping[str, str]) -> World:
    hosts = _integer(variables, "SLURM_STEP_NUM_NODES", 1)
    size = _integer(variables, "SLURM_STEP_NUM_TASKS", 1)
    if hosts > 1:
        raise _many_hosts(f"srun placed its {size} tasks on {hosts} nodes")
    job = _text(variables, "SLURM_JOB_ID")
    step = _text(variables, "SLURM_STEP_ID")
    return _checked(
        variables,
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_NUM_TASKS",
        job=f"slurm-{job}.{step}",
    )


def _inside_srun(variables: Mapping[str, str]) -> bool:
    """Whether an srun step runs this process, not the shell of `sbatch` or `salloc`."""
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return False
    return _integer(variables, "SLURM_STEP_ID", 0) < _FIRST_RESERVED_SLURM_STEP


def _checked(
    variables: Mapping[str, str],
    *,
    rank: str,
    size: str,
    local_rank: str,
    local_size: str,
    job: str,
) -> World:
    """The world that the variables of these names describe, if it is on one host."""
    total = _integer(variables, size, 1, _TOO_MANY_RANKS)
    here = _integer(variables, local_size, 1, _TOO_MANY_RANKS)
    if total != here:
        raise _many_hosts(f"{size}={total}, but {local_size}={here}")
    this = _integer(variables, rank, 0, total)
    this_here = _integer(variables, local_rank, 0, here)
    if this != this_here:
        raise LaunchEnvironmentError(
            f"{rank}={this} and {local_rank}={this_here} contradict each other: all "
            f"{total} ranks are on one host, so both must be the same."
        )
    return World(this, total, this_here, here, 0, 1, _short(job))


def _short(job: str) -> str:
    """The job's name, or a digest of it if it is too long for the engine."""
    if len(job.encode()) <= _LONGEST_JOB_NAME:
        return job
    return hashlib.sha256(job.encode()).hexdigest()


def _integer(
    variables: Mapping[str, str], name: str, least: int, below: int | None = None
) -> int:
    text = _text(variables, name)
    expected = f"an integer from {least}"
    if below is not None:
        expected += f" to {below - 1}"
    # int() also takes "1_0", " 1" and digits of other scripts.
    if not (text.isascii() and text.isdecimal()):
        raise LaunchEnvironmentError(f"{name}={text!r} is not {expected}.")
    if int(text) < least or (below is not None and int(text) >= below):
        raise LaunchEnvironmentError(f"{name}={text!r} is not {expected}.")
    return int(text)


def _text(variables: Mapping[str, str], name: str) -> str:
    text = variables.get(name)
    if text:
        return text
    was = "is not set" if text is None else "is empty"
    raise LaunchEnvironmentError(
        f"{name} {was}, although other variables of the same launcher are: start the "
        "program with khvdrun, mpirun or srun again, with their variables intact."
    )


def _many_hosts(evidence: str) -> LaunchEnvironmentError:
    return LaunchEnvironmentError(
        f"This job spans more than one host ({evidence}). This version of keras_hvd "
        "runs on one host only: start all ranks on the same host."
    )


def _hydra_job() -> str:
    """A name that all ranks of an MPICH job on this host share."""
    process = os.getppid()
    while process > 1:
        # The name is in parentheses and may contain parentheses.
        status = Path(f"/proc/{process}/stat").read_text()
        name, _, fields = status.partition("(")[2].rpartition(")")
        parent, started = fields.split()[1], fields.split()[19]
        if name in _HYDRA_PARENTS:
            return f"{process}-{started}"
        process = int(parent)
    raise LaunchEnvironmentError(
        "MPI_LOCALRANKID is set, as MPICH's mpiexec sets it, but no ancestor of this "
        f"process is one of {', '.join(_HYDRA_PARENTS)}: unset MPI_LOCALRANKID, or "
        "start the program with khvdrun."
    )
