"""Finds this process' rank and its job's size in the variables that its launcher set.

`khvdrun`, Open MPI's and MPICH's `mpirun`, Slurm's `srun`, Horovod's `horovodrun` (with
Gloo) and PyTorch's `torchrun` each use their own variables. Without any of them, the
process is a world of size 1.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from keras_hvd.exceptions import KerasHvdError
from keras_hvd.job import settings
from keras_hvd.world import unread_launchers
from keras_hvd.world.launchers.slurm import Step
from keras_hvd.world.rendezvous import address
from keras_hvd.world.unread_launchers import Sign

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

# Slurm writes the nodes a01 to a03, a07 and b as a[01-03,07],b.
_FIRST_NODE = re.compile(r"(?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|$)", re.A)
_LONGEST_NODE = 253
# And 2, 2, 2 and 1 tasks on four nodes as 2(x3),1.
_TASKS = re.compile(r"(\d{1,10})(?:\(x(\d{1,10})\))?", re.A)

# The engine's limit: the name is part of a socket's address.
_LONGEST_JOB_NAME = 80

# The engine's numbers of ranks have 32 bits.
_TOO_MANY_RANKS = 2**31

_TOO_LARGE_PORT = 2**16

_LONGEST_HOST_KEY = 256

_RENDEZVOUS = "KERAS_HVD_RENDEZVOUS"


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
        cross_rank: Number of this host among those with a process of this local rank,
            from 0; None until the ranks have met.
        cross_size: Number of hosts with a process of this local rank; None until the
            ranks have met.
        job: A name that no other running job on this host has; "" if rank 0 makes one
            up when the ranks meet.
        rendezvous: HOST:PORT where the ranks meet; None if all are on one host.
        host_key: What sets this process' host apart, if the user says so.
        mpi: "Open MPI" or "MPICH", if its mpirun placed the ranks on several hosts and
            they learn by MPI where to meet.
        step: The step, if srun placed its ranks on several nodes and they meet at the
            first of them.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int | None
    cross_size: int | None
    job: str
    rendezvous: str | None = None
    host_key: str | None = None
    mpi: str | None = None
    step: Step | None = None


class _Names(TypedDict):
    """The variables in which a launcher tells a rank's place."""

    rank: str
    size: str
    local_rank: str
    local_size: str


def world(environment: Mapping[str, str] | None = None) -> World:
    """Returns the rank, size and job that this process was launched with.

    Args:
        environment: The variables to read; by default those of this process.

    Returns:
        The `World` that `khvdrun`, else `mpirun`, else `horovodrun`, else `srun`, else
        `torchrun` described. Without any of them, a world of size 1 with a new job of
        its own.

    Raises:
        LaunchEnvironmentError: A variable is missing, malformed or contradicts another
            one, or the job spans more than one host, without a place to meet.

    Example:
        >>> from keras_hvd import environment
        >>> environment.world({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0",
        ...     "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        ...     "PMIX_NAMESPACE": "1891500033"})  # doctest: +NORMALIZE_WHITESPACE
        World(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1,
            job='openmpi-1891500033', rendezvous=None, host_key=None, mpi=None,
            step=None)
    """
    variables = os.environ if environment is None else environment
    read = _reader(variables)
    return World(0, 1, 0, 1, 0, 1, _new_job()) if read is None else read(variables)


def check_size(size: int, environment: Mapping[str, str] | None = None) -> Sign | None:
    """Checks a job's size against what must or may be meant.

    Args:
        size: The number of processes of the job that this one joins.
        environment: The variables to read; by default those of this process.

    Returns:
        The sign that there are others, which another launcher has started: this process
        would be alone by mistake. None if there is no sign, or if
        `KERAS_HVD_REQUIRE_SIZE` says that it is none.

    Raises:
        LaunchEnvironmentError: `KERAS_HVD_REQUIRE_SIZE` is another size.
        ValueError: `KERAS_HVD_REQUIRE_SIZE` is no size.

    Example:
        >>> from keras_hvd import environment
        >>> environment.check_size(1, {"MV2_COMM_WORLD_SIZE": "2"}).said
        'MV2_COMM_WORLD_SIZE=2 says that MVAPICH2 has started 2 processes'
        >>> environment.check_size(4, {"KERAS_HVD_REQUIRE_SIZE": "4"})
    """
    variables = os.environ if environment is None else environment
    required = settings.required_size(variables)
    if required == size:
        return None
    sign = unread_launchers.find(variables) if _reader(variables) is None else None
    if required == 0:
        return sign
    raise LaunchEnvironmentError(
        f"KERAS_HVD_REQUIRE_SIZE={required}, but this job has the size {size}"
        + (f": {sign}." if sign else ". Start it with so many ranks, or unset that.")
    )


_Reader = Callable[[Mapping[str, str]], World]


def _reader(variables: Mapping[str, str]) -> _Reader | None:
    """What reads the variables of this process' launcher; None if it has none.

    Horovod's variables without a place to meet are `khvdrun`'s, which sets them for
    scripts, and left to a process that is not to be a rank.
    """
    launched_by: tuple[tuple[str, _Reader], ...] = (
        ("KERAS_HVD_RANK", _from_khvdrun),
        ("OMPI_COMM_WORLD_RANK", _from_open_mpi),
        ("MPI_LOCALRANKID", _from_mpich),
        ("HOROVOD_GLOO_RENDEZVOUS_ADDR", _from_horovodrun),
    )
    for variable, read in launched_by:
        if variable in variables:
            return read
    if _inside_srun(variables):
        return _from_srun
    if "TORCHELASTIC_RUN_ID" in variables:
        return _from_torchrun
    return None


def _from_khvdrun(variables: Mapping[str, str]) -> World:
    prefix = "KERAS_HVD_"
    if variables.get(_RENDEZVOUS):
        return _meeting(
            variables,
            rank=prefix + "RANK",
            size=prefix + "SIZE",
            local_rank=prefix + "LOCAL_RANK",
            local_size=prefix + "LOCAL_SIZE",
            job=variables.get(prefix + "JOB", ""),
            rendezvous=variables[_RENDEZVOUS],
        )
    hosts = _integer(variables, prefix + "CROSS_SIZE", 1)
    if hosts > 1:
        raise _nowhere_to_meet(f"{prefix}CROSS_SIZE={hosts}")
    _integer(variables, prefix + "CROSS_RANK", 0, hosts)
    return _checked(
        variables,
        rank=prefix + "RANK",
        size=prefix + "SIZE",
        local_rank=prefix + "LOCAL_RANK",
        local_size=prefix + "LOCAL_SIZE",
        job=_text(variables, prefix + "JOB"),
        refuse=_nowhere_to_meet,
    )


def _from_open_mpi(variables: Mapping[str, str]) -> World:
    # The namespace of Open MPI 4 is a hash of 16 bits; this key is random.
    key = variables.get("OMPI_MCA_orte_precondition_transports")
    namespace = _text(variables, "PMIX_NAMESPACE")
    prefix = "OMPI_COMM_WORLD_"
    names: _Names = {
        "rank": prefix + "RANK",
        "size": prefix + "SIZE",
        "local_rank": prefix + "LOCAL_RANK",
        "local_size": prefix + "LOCAL_SIZE",
    }
    parts = ("openmpi", namespace, key) if key else ("openmpi", namespace)
    return _from_mpirun(variables, "Open MPI", names, lambda: "-".join(parts))


def _from_mpich(variables: Mapping[str, str]) -> World:
    names: _Names = {
        "rank": "PMI_RANK",
        "size": "PMI_SIZE",
        "local_rank": "MPI_LOCALRANKID",
        "local_size": "MPI_LOCALNRANKS",
    }
    return _from_mpirun(variables, "MPICH", names, lambda: f"mpich-{_hydra_job()}")


def _from_mpirun(
    variables: Mapping[str, str], mpi: str, names: _Names, job: Callable[[], str]
) -> World:
    """The world that an mpirun described; `job` names one that is on one host."""
    rendezvous = variables.get(_RENDEZVOUS) or None
    if rendezvous is None and _is_one_host(variables, names):
        return _checked(variables, **names, job=job())
    # Its hosts do not know the same name of the job.
    world = _meeting(variables, **names, job="", rendezvous=rendezvous)
    return world if rendezvous else dataclasses.replace(world, mpi=mpi)


def _is_one_host(variables: Mapping[str, str], names: _Names) -> bool:
    return variables.get(names["size"]) == variables.get(names["local_size"])


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
    nodes = _integer(variables, "SLURM_STEP_NUM_NODES", 1)
    step = _text(variables, "SLURM_STEP_ID")
    job = f"slurm-{_text(variables, 'SLURM_JOB_ID')}.{step}"
    if nodes > 1:
        return _from_srun_on_nodes(variables, nodes, job)
    return _checked(
        variables,
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_NUM_TASKS",
        job=job,
    )


def _from_srun_on_nodes(variables: Mapping[str, str], nodes: int, job: str) -> World:
    node = _integer(variables, "SLURM_NODEID", 0, nodes)
    rendezvous = variables.get(_RENDEZVOUS) or None
    tasks = "SLURM_STEP_TASKS_PER_NODE"
    world = _meeting(
        {**variables, tasks: str(_tasks_on(variables, node, nodes))},
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size=tasks,
        job=job,
        rendezvous=rendezvous,
    )
    if rendezvous:
        return world
    if world.rank == 0 and node != 0:
        raise LaunchEnvironmentError(
            f"SLURM_PROCID=0 and SLURM_NODEID={node} contradict each other: the ranks "
            "meet at the first node, where rank 0 must be. Set "
            f"{_RENDEZVOUS} to HOST:PORT of rank 0's node, for all ranks."
        )
    step = Step(world.job, _first_node(variables), is_on_first_node=node == 0)
    return dataclasses.replace(world, step=step)


def _tasks_on(variables: Mapping[str, str], node: int, nodes: int) -> int:
    """The number of the step's tasks on a node."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = _text(variables, name)
    parts = [_TASKS.fullmatch(part) for part in text.split(",")]
    counts = [(int(one[1]), int(one[2] or 1)) for one in parts if one]
    size = _integer(variables, "SLURM_STEP_NUM_TASKS", 1, _TOO_MANY_RANKS)
    given = sum(times for _, times in counts), sum(n * times for n, times in counts)
    if len(counts) != len(parts) or given != (nodes, size):
        raise LaunchEnvironmentError(
            f"{name}={text!r} is not the numbers of {size} tasks "
            f"(SLURM_STEP_NUM_TASKS) on {nodes} nodes (SLURM_STEP_NUM_NODES)."
        )
    ends = itertools.accumulate(times for _, times in counts)
    return next(n for (n, _), end in zip(counts, ends, strict=True) if node < end)


def _first_node(variables: Mapping[str, str]) -> str:
    """The name of the step's first node."""
    text = _text(variables, "SLURM_STEP_NODELIST")
    found = _FIRST_NODE.match(text)
    name = re.sub(r"\[(\d+)[^]]*\]", r"\1", found[0]) if found else ""
    if not name or len(name) > _LONGEST_NODE:
        raise LaunchEnvironmentError(
            f"SLURM_STEP_NODELIST={text[:_LONGEST_NODE]!r} does not begin with the "
            "name of a node, or with names such as a[01-03,07]."
        )
    return name


def _from_torchrun(variables: Mapping[str, str]) -> World:
    store = _text(variables, "MASTER_ADDR")
    port = _integer(variables, "MASTER_PORT", 1, _TOO_LARGE_PORT)
    job = f"torchrun-{variables['TORCHELASTIC_RUN_ID']}-{store}-{port}"
    rendezvous = variables.get(_RENDEZVOUS)
    names: _Names = {
        "rank": "RANK",
        "size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_size": "LOCAL_WORLD_SIZE",
    }
    if _is_one_host(variables, names) and not rendezvous:
        return _checked(variables, **names, job=job)
    # torchrun's own store listens at MASTER_PORT.
    beside = port + 1 if port + 1 < _TOO_LARGE_PORT else port - 1
    return _meeting(
        variables,
        **names,
        job=job,
        rendezvous=rendezvous or str(address.Address(store, beside)),
    )


def _meeting(
    variables: Mapping[str, str],
    *,
    rank: str,
    size: str,
    local_rank: str,
    local_size: str,
    job: str,
    rendezvous: str | None,
) -> World:
    """The world that the variables of these names describe, on any hosts."""
    try:
        if rendezvous is not None:
            address.parse(rendezvous)
    except ValueError as error:
        raise LaunchEnvironmentError(f"{_RENDEZVOUS}: {error}") from None
    total = _integer(variables, size, 1, _TOO_MANY_RANKS)
    here = _integer(variables, local_size, 1, _TOO_MANY_RANKS)
    if here > total:
        raise LaunchEnvironmentError(
            f"{local_size}={here} and {size}={total} contradict each other: no host "
            "has more ranks than the job."
        )
    place = _integer(variables, rank, 0, total)
    place_here = _integer(variables, local_rank, 0, here)
    if total == 1:
        return World(0, 1, 0, 1, 0, 1, _new_job())
    key = variables.get("KERAS_HVD_HOST_KEY") or None
    if key is not None and len(key) > _LONGEST_HOST_KEY:
        raise LaunchEnvironmentError(
            f"KERAS_HVD_HOST_KEY has {len(key)} characters, and may have "
            f"{_LONGEST_HOST_KEY}."
        )
    cross_rank, cross_size = _cross(variables, total)
    return World(
        *(place, total, place_here, here, cross_rank, cross_size),
        *(job_name(job), rendezvous, key),
    )


def _cross(variables: Mapping[str, str], total: int) -> tuple[int | None, int | None]:
    """This host's number and the number of hosts; None if the variables are not set."""
    names = "KERAS_HVD_CROSS_RANK", "KERAS_HVD_CROSS_SIZE"
    if not any(variables.get(name) for name in names):
        return None, None
    hosts = _integer(variables, names[1], 1, total + 1)
    return _integer(variables, names[0], 0, hosts), hosts


def _new_job() -> str:
    """A name for a job of this process alone."""
    return f"single-{os.getpid()}-{uuid.uuid4().hex[:16]}"


def _inside_srun(variables: Mapping[str, str]) -> bool:
    """Whether an srun step runs this process, not the shell of `sbatch` or `salloc`."""
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return False
    return _integer(variables, "SLURM_STEP_ID", 0) < _FIRST_RESERVED_SLURM_STEP


def _many_hosts(evidence: str) -> LaunchEnvironmentError:
    return LaunchEnvironmentError(
        f"This job spans more than one host ({evidence}), and with this launcher "
        "keras_hvd runs on one host only: start it with khvdrun --nnodes on each host, "
        "or all ranks on one host."
    )


def _nowhere_to_meet(evidence: str) -> LaunchEnvironmentError:
    return LaunchEnvironmentError(
        f"This job spans more than one host ({evidence}), and its ranks have no place "
        f"to meet: set {_RENDEZVOUS} to HOST:PORT on rank 0's host, for all ranks."
    )


def _checked(
    variables: Mapping[str, str],
    *,
    rank: str,
    size: str,
    local_rank: str,
    local_size: str,
    job: str,
    refuse: Callable[[str], LaunchEnvironmentError] = _many_hosts,
) -> World:
    """The world that the variables of these names describe, if it is on one host."""
    total = _integer(variables, size, 1, _TOO_MANY_RANKS)
    here = _integer(variables, local_size, 1, _TOO_MANY_RANKS)
    if total != here:
        raise refuse(f"{size}={total}, but {local_size}={here}")
    this = _integer(variables, rank, 0, total)
    this_here = _integer(variables, local_rank, 0, here)
    if this != this_here:
        raise LaunchEnvironmentError(
            f"{rank}={this} and {local_rank}={this_here} contradict each other: all "
            f"{total} ranks are on one host, so both must be the same."
        )
    return World(this, total, this_here, here, 0, 1, job_name(job))


def job_name(job: str) -> str:
    """The name, or a digest of it if it is too long for the engine.

    Args:
        job: a name of any length.

    Example:

    >>> job_name("openmpi-1891500033"), len(job_name(100 * "long"))
    ('openmpi-1891500033', 64)
    """
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


def _hydra_job() -> str:
    """A name that all ranks of an MPICH job on this host share."""
    process = os.getppid()
    while process > 1:
        try:
            status = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            # One that is hidden is another user's, and so no such ancestor.
            break
        # The name is in parentheses and may contain parentheses.
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
