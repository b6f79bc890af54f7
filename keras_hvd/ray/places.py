"""Tells Ray's workers their places in a job, before their script joins it.

Rank 0's process listens from then on, so nobody else gets the port. The secret is drawn
by the process that starts the job, and travels with the places, by Ray's own messages.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from keras_hvd.exceptions import KerasHvdError
from keras_hvd.launch import places as launch_places
from keras_hvd.launch.places import Node
from keras_hvd.world.rendezvous import network_interfaces
from keras_hvd.world.rendezvous.listener import listen_early

_SECRET_BYTES = 32

# (rank, function, arguments): a reference to the result in that rank's process.
Ask = Callable[..., Any]


def look() -> Callable[[], tuple[str, str, str]]:
    """The function by which a worker tells of its node, for `Node`."""

    # Ray sends a function within a function as a whole: that node may lack keras_hvd.
    def look_around() -> tuple[str, str, str]:
        import ray

        try:
            from keras_hvd.version import __version__ as version
        except ImportError:
            version = ""
        key = ray.get_runtime_context().get_node_id()
        return key, ray.util.get_node_ip_address(), version

    return look_around


def seat(
    nodes: Sequence[Node],
    ask: Ask,
    variables: Mapping[str, str],
    interfaces: Sequence[str],
    timeout: float,
) -> None:
    """Tells each worker its place: rank r is the one on `nodes[r]`.

    All get `variables`. Rank 0 listens at one of the network interfaces, if they are
    named. Raises KerasHvdError if a node has no keras_hvd, or another version, or if a
    worker does not answer in time.
    """
    launch_places.require_one_version(
        nodes, "install it there, or give ray.init a runtime_env with its wheel"
    )
    listening = _get([ask(0, _listen, nodes[0].address, interfaces)], timeout)
    common = {
        **variables,
        "KERAS_HVD_RENDEZVOUS": listening[0],
        "KERAS_HVD_SECRET": secrets.token_hex(_SECRET_BYTES),
    }
    keys = [node.key for node in nodes]
    told = [
        ask(rank, _sit, {**common, **launch_places.variables(keys, rank)})
        for rank in range(len(nodes))
    ]
    _get(told, timeout)


def _get(references: Sequence[Any], timeout: float) -> list[Any]:
    try:
        return ray.get([*references], timeout=timeout)
    except GetTimeoutError:
        raise KerasHvdError(
            f"not all of Ray's workers have taken their places within {timeout:g} s: "
            "`ray status` shows what they wait for"
        ) from None


def _listen(host: str, interfaces: Sequence[str]) -> str:
    """Makes rank 0's process listen, and returns where."""
    if interfaces:
        host = network_interfaces.reachable(interfaces)[0]
    return str(listen_early(host))


def _sit(variables: dict[str, str]) -> None:
    """Gives a worker's process its place, and TensorFlow as many threads as CPUs."""
    os.environ.update(variables)
    # Ray sets OMP_NUM_THREADS alone.
    cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(max(1, int(cpus))))
