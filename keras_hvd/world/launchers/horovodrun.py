"""Horovod's `horovodrun` with Gloo, on one host.

Without a place to meet, its variables are `khvdrun`'s, which sets them for scripts and
leaves them to a process that must not be a rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from keras_hvd.world.launchers.launcher import World
from keras_hvd.world.launchers.variables import (
    beginning,
    integer,
    many_hosts,
    on_one_host,
    text_of,
)


def is_here(variables: Mapping[str, str]) -> bool:
    """Whether `horovodrun` has started the process that has these variables.

    >>> is_here({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"})
    True
    """
    return "HOROVOD_GLOO_RENDEZVOUS_ADDR" in variables


def world(variables: Mapping[str, str]) -> World:
    """The place from `horovodrun` for this process. Raises LaunchEnvironmentError."""
    hosts = integer(variables, "HOROVOD_CROSS_SIZE", 1)
    if hosts > 1:
        raise many_hosts(f"HOROVOD_CROSS_SIZE={hosts}")
    # The launcher listens at this address as long as the job runs.
    address = text_of(variables, "HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = text_of(variables, "HOROVOD_GLOO_RENDEZVOUS_PORT")
    job = f"horovodrun-{address}-{port}"
    return on_one_host(variables, beginning("HOROVOD_"), job)
