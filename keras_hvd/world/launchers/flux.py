"""Flux, on one node or several."""

from __future__ import annotations

from collections.abc import Mapping

from keras_hvd.world.launchers.launcher import LaunchEnvironmentError, World
from keras_hvd.world.launchers.variables import (
    RENDEZVOUS,
    Names,
    integer,
    on_any_hosts,
    on_one_host,
    text_of,
)

# How many tasks are on a node, it tells none of them.
_NAMES = Names("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "")


def is_here(variables: Mapping[str, str]) -> bool:
    """Whether Flux has started the process that has these variables as a task.

    >>> is_here({"FLUX_TASK_RANK": "0"})
    True
    """
    return "FLUX_TASK_RANK" in variables


def world(variables: Mapping[str, str]) -> World:
    """The place from Flux for this process. Raises LaunchEnvironmentError."""
    rendezvous = variables.get(RENDEZVOUS)
    nodes = integer(variables, "FLUX_JOB_NNODES", 1)
    if nodes == 1 and not rendezvous:
        job = f"flux-{text_of(variables, 'FLUX_JOB_ID')}"
        return on_one_host(variables, _NAMES._replace(local_size=_NAMES.size), job)
    found = on_any_hosts(variables, _NAMES, "", rendezvous or None)
    if found.size > 1 and not rendezvous:
        raise LaunchEnvironmentError(
            f"Flux has started the ranks of this job on {nodes} nodes "
            f"(FLUX_JOB_NNODES), and they have no place to meet: set {RENDEZVOUS} to "
            "HOST:PORT on rank 0's node, and KERAS_HVD_SECRET_FILE, for all ranks."
        )
    return found
