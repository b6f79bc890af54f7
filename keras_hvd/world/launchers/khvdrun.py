"""`khvdrun`, and other programs that set its variables."""

from __future__ import annotations

from collections.abc import Mapping

from keras_hvd.world.launchers.launcher import LaunchEnvironmentError, World
from keras_hvd.world.launchers.variables import (
    RENDEZVOUS,
    beginning,
    integer,
    on_any_hosts,
    on_one_host,
    text_of,
)


def is_here(variables: Mapping[str, str]) -> bool:
    """Whether `khvdrun` has started the process that has these variables.

    >>> is_here({"KERAS_HVD_RANK": "0"})
    True
    """
    return "KERAS_HVD_RANK" in variables


def world(variables: Mapping[str, str]) -> World:
    """The place from `khvdrun` for this process. Raises LaunchEnvironmentError."""
    names = beginning("KERAS_HVD_")
    if rendezvous := variables.get(RENDEZVOUS):
        job = variables.get("KERAS_HVD_JOB", "")
        return on_any_hosts(variables, names, job, rendezvous)
    hosts = integer(variables, "KERAS_HVD_CROSS_SIZE", 1)
    if hosts > 1:
        raise _nowhere_to_meet(f"KERAS_HVD_CROSS_SIZE={hosts}")
    integer(variables, "KERAS_HVD_CROSS_RANK", 0, hosts)
    job = text_of(variables, "KERAS_HVD_JOB")
    return on_one_host(variables, names, job, _nowhere_to_meet)


def _nowhere_to_meet(evidence: str) -> LaunchEnvironmentError:
    return LaunchEnvironmentError(
        f"This job spans more than one host ({evidence}), and its ranks have no place "
        f"to meet: set {RENDEZVOUS} to HOST:PORT on rank 0's host, for all ranks."
    )
