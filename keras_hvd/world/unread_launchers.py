"""Tells if a launcher that `environment.world` does not read has started several ranks.

Otherwise, each would be a job of size 1, and train alone without a warning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

_BY_VARIABLES = (
    "set KERAS_HVD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE and _RENDEZVOUS for each "
    "process"
)
_BY_KHVDRUN = (
    "start the script on each node with khvdrun --nnodes N --node-rank K --rendezvous "
    "HOST:PORT -np RANKS"
)
_WHICH_READS_THEM = (
    "start the script on each node with khvdrun -np RANKS, which reads such variables"
)


@dataclass(frozen=True)
class Sign:
    """A launcher has started several processes, one of which is this one.

    Args:
        said: the variable that shows it, and its meaning.
        remedy: how to make them one job.
        is_first: whether this process warns for all; so do all processes that do not
            know their own number.
    """

    said: str
    remedy: str
    is_first: bool

    def __str__(self) -> str:
        return (
            f"{self.said}, and init() does not read such variables: this process is "
            f"a job of size 1, which trains alone. To have one job, {self.remedy}. If "
            "each shall train alone, set KERAS_HVD_REQUIRE_SIZE=1"
        )


def find(variables: Mapping[str, str]) -> Sign | None:
    """The sign that this process is one of several, if there is any.

    Args:
        variables: those of a process whose place `environment.world` does not know.

    Example:

    >>> find({"PMI_SIZE": "4", "PMI_RANK": "0"}).said
    'PMI_SIZE=4 says that MPI has started 4 processes'
    >>> find({"PMI_SIZE": "1", "PMI_RANK": "0"}) is None
    True
    """
    return next((sign for look in _LOOKS if (sign := look(variables))), None)


@dataclass(frozen=True)
class _Launcher:
    """A launcher that gives each process two numbers.

    Args:
        name: of the launcher, or of its purpose.
        rank: the variable with the process' number.
        size: the variable with their number; None if there is none.
        what: "processes", or "nodes", of which each may have several.
        marks: variables, one of which sets it apart from launchers with the same two.
        excluding: variables of other launchers; none of them may be set.
    """

    name: str
    rank: str
    size: str | None
    what: str = "processes"
    marks: tuple[str, ...] = ()
    excluding: tuple[str, ...] = ()

    def __call__(self, variables: Mapping[str, str]) -> Sign | None:
        if self.marks and not any(variables.get(mark) for mark in self.marks):
            return None
        if any(other in variables for other in self.excluding):
            return None
        rank = _number(variables.get(self.rank))
        size = None if self.size is None else _number(variables.get(self.size))
        remedy = _BY_KHVDRUN
        if self.what == "processes":
            remedy = f"{_BY_VARIABLES}, or {remedy}"
        if size is None and rank is not None:
            # Later processes know that there are others; the first does not.
            said = f"{self.rank}={rank} says that {self.name} has started others before"
            return Sign(said, remedy, rank == 1) if rank > 0 else None
        if size is None or size < 2:
            return None
        said = f"{self.size}={size} says that {self.name} has started {size}"
        return Sign(f"{said} {self.what}", remedy, rank in (0, None))


def _from_pytorchs(variables: Mapping[str, str]) -> Sign | None:
    # PyTorch's variables for nodes and for processes have the same names.
    size, rank = _number(variables.get("WORLD_SIZE")), _number(variables.get("RANK"))
    if size is None or rank is None or size < 2 or not variables.get("MASTER_ADDR"):
        return None
    return Sign(
        f"WORLD_SIZE={size} says that a launcher for PyTorch has started {size} "
        "processes or nodes",
        f"{_WHICH_READS_THEM}, or take torchrun",
        rank == 0,
    )


def _from_pet(variables: Mapping[str, str]) -> Sign | None:
    """Reads torchrun's options from variables, as Kubeflow's trainer sets them."""
    for name, what in (
        ("PET_NNODES", "nodes"),
        ("PET_NPROC_PER_NODE", "processes a node"),
    ):
        # "2:4" means from 2 to 4. "auto" is not known here.
        count = _number((variables.get(name) or "").rpartition(":")[2])
        if count is not None and count > 1:
            number = _number(variables.get("PET_NODE_RANK"))
            return Sign(
                f"{name}={variables[name]} says that torchrun is to start up to "
                f"{count} {what}",
                f"{_WHICH_READS_THEM}, or take torchrun",
                number in (0, None),
            )
    return None


def _from_sagemaker(variables: Mapping[str, str]) -> Sign | None:
    hosts = _json(variables, "SM_HOSTS")
    if not isinstance(hosts, list) or len(hosts) < 2:
        return None
    own = variables.get("SM_CURRENT_HOST")
    return Sign(
        f"SM_HOSTS says that SageMaker has started {len(hosts)} nodes",
        _WHICH_READS_THEM,
        own == hosts[0] or own not in hosts,
    )


def _from_cluster(
    name: str, kinds: tuple[str, ...], variables: Mapping[str, str]
) -> Sign | None:
    """Reads a cluster of named kinds of nodes, of which some train."""
    given = _json(variables, name)
    cluster, task = (_part(given, part) for part in ("cluster", "task"))
    nodes = {kind: len(_sequence(cluster.get(kind))) for kind in kinds}
    count = sum(nodes.values())
    own = task.get("type")
    if count < 2 or (own is not None and own not in kinds):
        return None
    first = next(kind for kind in kinds if nodes[kind])
    return Sign(
        f"{name} says that the cluster has {count} nodes that train",
        _WHICH_READS_THEM,
        own is None or (own == first and _number(str(task.get("index"))) == 0),
    )


def _number(text: str | None) -> int | None:
    """A number of processes; None for anything else."""
    # int() also takes "1_0", and refuses texts of thousands of digits.
    if text is None or len(text) > 9 or not (text.isascii() and text.isdecimal()):
        return None
    return int(text)


def _json(variables: Mapping[str, str], name: str) -> Any:
    """The value of a variable; None if it is no JSON, which others complain about."""
    try:
        return json.loads(variables.get(name) or "null")
    except (ValueError, RecursionError):
        return None


def _part(given: Any, name: str) -> dict[str, Any]:
    part = given.get(name) if isinstance(given, dict) else None
    return part if isinstance(part, dict) else {}


def _sequence(given: Any) -> list[Any]:
    # A cluster may also be written as {"worker": {"0": "host:port"}}.
    return [*given] if isinstance(given, (list, dict)) else []


# The more special ones come first: some also set variables of others.
_LOOKS: tuple[Callable[[Mapping[str, str]], Sign | None], ...] = (
    # A shell of salloc passes on the variables of its own step.
    _Launcher("MPI", "PMI_RANK", "PMI_SIZE", excluding=("SLURM_JOB_ID",)),
    _Launcher("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE"),
    _from_sagemaker,
    # The third of its pools has servers, and the fourth evaluates.
    partial(_from_cluster, "CLUSTER_SPEC", ("workerpool0", "workerpool1")),
    # The other kinds serve, or evaluate, alone.
    partial(_from_cluster, "TF_CONFIG", ("chief", "master", "worker")),
    _from_pet,
    _from_pytorchs,
    _Launcher(
        *("AWS Batch", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
        what="nodes",
    ),
    _Launcher("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", what="nodes"),
    # It has no size, and may have pods that train alone.
    _Launcher("an Indexed Job", "JOB_COMPLETION_INDEX", None, what="nodes"),
)
