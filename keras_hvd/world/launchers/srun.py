"""Slurm's `srun`, on one node or several."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping

from keras_hvd.world.launchers.launcher import LaunchEnvironmentError, World
from keras_hvd.world.launchers.slurm import Step
from keras_hvd.world.launchers.variables import (
    RENDEZVOUS,
    TOO_MANY_RANKS,
    Names,
    integer,
    on_any_hosts,
    on_one_host,
    text_of,
)

# Slurm numbers steps that do not launch ranks (batch scripts, interactive shells) from
# the top of 32 bits downwards.
_FIRST_RESERVED_SLURM_STEP = 0xFFFFFFF0

# Slurm writes the nodes a01 to a03, a07 and b as a[01-03,07],b.
_FIRST_NODE = re.compile(r"(?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|$)", re.A)
_LONGEST_NODE = 253
# Slurm writes 2, 2, 2 and 1 tasks on four nodes as 2(x3),1.
_TASKS = re.compile(r"(\d{1,10})(?:\(x(\d{1,10})\))?", re.A)

_NAMES = Names(
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def is_here(variables: Mapping[str, str]) -> bool:
    """Whether an srun step runs this process, not the shell of `sbatch` or `salloc`.

    >>> is_here({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"})
    True
    >>> is_here({"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"})
    False
    """
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return False
    return integer(variables, "SLURM_STEP_ID", 0) < _FIRST_RESERVED_SLURM_STEP


def world(variables: Mapping[str, str]) -> World:
    """The place from `srun` for this process. Raises LaunchEnvironmentError."""
    nodes = integer(variables, "SLURM_STEP_NUM_NODES", 1)
    step = text_of(variables, "SLURM_STEP_ID")
    job = f"slurm-{text_of(variables, 'SLURM_JOB_ID')}.{step}"
    if nodes > 1:
        return _on_nodes(variables, nodes, job)
    return on_one_host(variables, _NAMES._replace(local_size=_NAMES.size), job)


def _on_nodes(variables: Mapping[str, str], nodes: int, job: str) -> World:
    node = integer(variables, "SLURM_NODEID", 0, nodes)
    rendezvous = variables.get(RENDEZVOUS) or None
    read = {**variables, _NAMES.local_size: str(_tasks_on(variables, node, nodes))}
    found = on_any_hosts(read, _NAMES, job, rendezvous)
    if rendezvous:
        return found
    if found.rank == 0 and node != 0:
        raise LaunchEnvironmentError(
            f"SLURM_PROCID=0 and SLURM_NODEID={node} contradict each other: the ranks "
            "meet at the first node, where rank 0 must be. Set "
            f"{RENDEZVOUS} to HOST:PORT of rank 0's node, for all ranks."
        )
    step = Step(found.job, _first_node(variables), is_on_first_node=node == 0)
    return dataclasses.replace(found, way=step)


def _tasks_on(variables: Mapping[str, str], node: int, nodes: int) -> int:
    """The number of the step's tasks on a node."""
    name = _NAMES.local_size
    text = text_of(variables, name)
    parts = [_TASKS.fullmatch(part) for part in text.split(",")]
    counts = [(int(one[1]), int(one[2] or 1)) for one in parts if one]
    size = integer(variables, _NAMES.size, 1, TOO_MANY_RANKS)
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
    text = text_of(variables, "SLURM_STEP_NODELIST")
    found = _FIRST_NODE.match(text)
    name = re.sub(r"\[(\d+)[^]]*\]", r"\1", found[0]) if found else ""
    if not name or len(name) > _LONGEST_NODE:
        raise LaunchEnvironmentError(
            f"SLURM_STEP_NODELIST={text[:_LONGEST_NODE]!r} does not begin with the "
            "name of a node, or with names such as a[01-03,07]."
        )
    return name
