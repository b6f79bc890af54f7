"""The places of ranks in processes that a cluster's engine starts: Ray's or Spark's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keras_hvd.exceptions import KerasHvdError
from keras_hvd.launch.node_ranks import of_horovod
from keras_hvd.version import __version__


@dataclass(frozen=True)
class Node:
    """What a process tells of its node."""

    key: str
    address: str
    version: str  # of keras_hvd; "" without it


def require_one_version(nodes: Sequence[Node], advice: str) -> None:
    """Raises KerasHvdError if a node has no keras_hvd, or not this version.

    Example:

    >>> require_one_version([Node("a", "10.0.0.1", "")], "install it there")
    Traceback (most recent call last):
    keras_hvd.exceptions.KerasHvdError: all nodes need keras_hvd 0.1.0, as here, and \
10.0.0.1 has none: install it there
    """
    others = {
        node.address: f"has keras_hvd {node.version}" if node.version else "has none"
        for node in nodes
        if node.version != __version__
    }
    if others:
        said = ", ".join(f"{address} {what}" for address, what in others.items())
        raise KerasHvdError(
            f"all nodes need keras_hvd {__version__}, as here, and {said}: {advice}"
        )


def variables(keys: Sequence[str], rank: int) -> dict[str, str]:
    """The variables of a rank's place, where rank r is on the node `keys[r]`.

    Example:

    >>> found = variables(["a", "b", "a"], 2)
    >>> found["KERAS_HVD_LOCAL_RANK"], found["HOROVOD_SIZE"]
    ('1', '3')
    """
    key = keys[rank]
    place = {
        "RANK": rank,
        "SIZE": len(keys),
        "LOCAL_RANK": keys[:rank].count(key),
        "LOCAL_SIZE": keys.count(key),
    }
    own = {f"KERAS_HVD_{name}": str(value) for name, value in place.items()}
    return {**own, **of_horovod(place)}
