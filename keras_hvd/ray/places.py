"""Tells Ray's workers their places in a job, before their script joins it.

Rank 0's process listens from then on, so nobody else gets the port. The secret is drawn
by the process that starts the job, and travels with the places, by Ray's own messages.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from keras_hvd.exceptions import KerasHvdError
from keras_hvd.launch.node_ranks import of_horovod
from keras_hvd.version import __version__
from keras_hvd.world.rendezvous import network_interfaces
from keras_hvd.world.rendezvous.listener import listen_early

_SECRET_BYTES = 32

# (rank, function, arguments): a reference to the result in that rank's process.
Ask = Callable[..., Any]


@dataclass(frozen=True)
class Node:
    """What a worker tells of its node."""

    key: str
    address: str
    version: str  # of keras_hvd; "" without it


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
    _require_one_version(nodes)
    listening = _get([ask(0, _listen, nodes[0].address, interfaces)], timeout)
    common = {
        **variables,
        "KERAS_HVD_RENDEZVOUS": listening[0],
        "KERAS_HVD_SECRET": secrets.token_hex(_SECRET_BYTES),
    }
    keys = [node.key for node in nodes]
    told = []
    for rank, key in enumerate(keys):
        place = {
            "RANK": rank,
            "SIZE": len(nodes),
            "LOCAL_RANK": keys[:rank].count(key),
            "LOCAL_SIZE": keys.count(key),
        }
        own = {f"KERAS_HVD_{name}": str(value) for name, value in place.items()}
        told.append(ask(rank, _sit, {**common, **own, **of_horovod(place)}))
    _get(told, timeout)


def _get(references: Sequence[Any], timeout: float) -> list[Any]:
    try:
        return ray.get([*references], timeout=timeout)
    except GetTimeoutError:
        raise KerasHvdError(
            f"not all of Ray's workers have taken their places within {timeout:g} s: "
            "`ray status` shows what they wait for"
        ) from None


def _require_one_version(nodes: Sequence[Node]) -> None:
    others = {
        node.address: f"has keras_hvd {node.version}" if node.version else "has none"
        for node in nodes
        if node.version != __version__
    }
    if others:
        said = ", ".join(f"{address} {what}" for address, what in others.items())
        raise KerasHvdError(
            f"all nodes need keras_hvd {__version__}, as here, and {said}: install it "
            "there, or give ray.init a runtime_env with its wheel"
        )


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
