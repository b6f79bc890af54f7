"""The place of this host among several, from the variables of a cluster.

Kubernetes' operators and clouds start a program on each node and tell it, by variables,
how many there are and which one it is. `khvdrun` takes from these what its options do
not say.
"""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_hvd.job import cores, settings
from keras_hvd.launch import values
from keras_hvd.launch.usage import UsageError
from keras_hvd.world.rendezvous.address import Address

# Images are pulled and pods are queued before the last host is there.
_START_TIMEOUT = "600"

# Where a cluster names hosts, but no port.
_PORT = 29400

_MOST_NODES = 1 << 16
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class Place:
    """What a cluster tells of this host. Each part is beside the variable it is from.

    Args:
        nodes: their number.
        number: this one's, from 0.
        rendezvous: HOST:PORT on the first one.
        ranks: to start here; None for as many as there are GPUs.
        interface: the network between them; "" if it is not told.
    """

    nodes: tuple[int, str]
    number: tuple[int, str] | None
    rendezvous: tuple[str, str]
    ranks: tuple[int, str] | None = None
    interface: tuple[str, str] = ("", "")


def take(given: Namespace, variables: Mapping[str, str]) -> None:
    """Takes what the options do not say from the first cluster with several nodes.

    `given.taken` then tells what was taken from where. Raises UsageError if a variable
    is missing, malformed, or contradicts another one.

    Example:

    >>> given = Namespace(
    ...     nnodes=None, node_rank=None, rendezvous=None, num_proc=2, variables={}
    ... )
    >>> take(given, {"WORLD_SIZE": "2", "RANK": "1",
    ...     "MASTER_ADDR": "train-0", "MASTER_PORT": "23456"})
    >>> given.nnodes, given.node_rank, given.rendezvous
    ((2, 2), 1, 'train-0:23457')
    """
    asked = (given.nnodes, given.node_rank, given.rendezvous, given.num_proc)
    if given.nnodes == (1, 1) or None not in asked:
        return
    place = next((found for look in _LOOKS if (found := look(variables))), None)
    if place is None and given.nnodes is None:
        return
    taken: dict[str, str] = {}
    if place is not None:
        _take_place(given, place, taken)
    if given.node_rank is None:
        _take(given, "node_rank", "--node-rank", _completion_index(variables), taken)
    if taken or place is not None:
        _take_defaults(given, variables, place, taken)
    given.taken = taken


def _take_place(given: Namespace, place: Place, taken: dict[str, str]) -> None:
    if given.nnodes is None:
        given.nnodes = (place.nodes[0], place.nodes[0])
        taken[f"--nnodes {place.nodes[0]}"] = place.nodes[1]
    _take(given, "node_rank", "--node-rank", place.number, taken)
    _take(given, "rendezvous", "--rendezvous", place.rendezvous, taken)


def _take(
    given: Namespace,
    name: str,
    option: str,
    found: tuple[Any, str] | None,
    taken: dict[str, str],
) -> None:
    if found is not None and getattr(given, name) is None:
        setattr(given, name, found[0])
        taken[f"{option} {found[0]}"] = found[1]


def _take_defaults(
    given: Namespace,
    variables: Mapping[str, str],
    place: Place | None,
    taken: dict[str, str],
) -> None:
    ranks = None if place is None else place.ranks
    gpus = _visible_gpus(variables)
    default = (gpus, "the GPUs that are visible") if gpus else (1, "no GPU is visible")
    _take(given, "num_proc", "-np", ranks or default, taken)
    ours = {**variables, **given.variables}
    if not settings.read(ours).init_timeout:
        name = "KERAS_HVD_INIT_TIMEOUT_SECONDS"
        given.variables = {**given.variables, name: _START_TIMEOUT}
        taken[f"--start-timeout {_START_TIMEOUT}"] = "hosts of a cluster come late"
    interface = ("", "") if place is None else place.interface
    if interface[0] and not settings.network_interfaces(ours):
        name = "KERAS_HVD_NETWORK_INTERFACES"
        given.variables = {**given.variables, name: interface[0]}
        taken[f"--network-interfaces {interface[0]}"] = interface[1]


def _from_pet(variables: Mapping[str, str]) -> Place | None:
    """torchrun's options, as Kubeflow's operators set them."""
    name = "PET_NNODES"
    if not variables.get(name):
        return None
    least, colon, most = variables[name].partition(":")
    if colon and least != most:
        raise UsageError(
            f"{name}={variables[name]} is a range: if hosts are to come and go, give "
            f"--nnodes {variables[name]}, --node-rank and --rendezvous{_NOT}"
        )
    nodes = _number({name: least}, name, 1, _MOST_NODES)
    if nodes == 1:
        return None
    why = f"{name}={variables[name]}"
    number = None
    if variables.get("PET_NODE_RANK") or "JOB_COMPLETION_INDEX" not in variables:
        number = _number_of_node(variables, "PET_NODE_RANK", nodes, why)
    return Place(
        (nodes, name),
        number,
        _beside(variables, "PET_MASTER_ADDR", "PET_MASTER_PORT", why),
        _ranks_of_pet(variables),
    )


def _ranks_of_pet(variables: Mapping[str, str]) -> tuple[int, str] | None:
    name = "PET_NPROC_PER_NODE"
    told = variables.get(name, "auto")
    if told == "auto":
        return None
    if told == "cpu":
        return cores.available(), name
    if told == "gpu":
        gpus = _visible_gpus(variables)
        if not gpus:
            raise UsageError(f"{name}=gpu, and no GPU is visible{_NOT}")
        return gpus, name
    return _number(variables, name, 1, _MOST_NODES), name


def _from_sagemaker(variables: Mapping[str, str]) -> Place | None:
    hosts = _json(variables, "SM_HOSTS", list)
    if hosts is None or len(hosts) < 2:
        return None
    why = f"SM_HOSTS has {len(hosts)} hosts"
    if not all(isinstance(each, str) and each for each in hosts):
        told = variables["SM_HOSTS"]
        raise UsageError(f"SM_HOSTS={told!r} is not names of hosts{_NOT}")
    own = _text(variables, "SM_CURRENT_HOST", why)
    if own not in hosts:
        raise UsageError(f"SM_CURRENT_HOST={own} is none of {', '.join(hosts)}{_NOT}")
    gpus = _number({"SM_NUM_GPUS": "0", **variables}, "SM_NUM_GPUS", 0, _MOST_NODES)
    name = "SM_NETWORK_INTERFACE_NAME"
    return Place(
        (len(hosts), "SM_HOSTS"),
        (hosts.index(own), "SM_CURRENT_HOST"),
        _rendezvous(f"{hosts[0]}:{_PORT}", "SM_HOSTS"),
        (gpus, "SM_NUM_GPUS") if gpus else None,
        (variables.get(name, ""), name),
    )


@dataclass(frozen=True)
class _Cluster:
    """Reads a cluster of several kinds of nodes, of which some train.

    Args:
        name: the variable.
        kinds: those that train, in the order of their ranks.
    """

    name: str
    kinds: tuple[str, ...]

    def __call__(self, variables: Mapping[str, str]) -> Place | None:
        told = _json(variables, self.name, dict)
        cluster = self._part(told, "cluster")
        places = [
            (kind, index, each)
            for kind in self.kinds
            for index, each in enumerate(self._replicas(cluster, kind))
        ]
        if len(places) < 2:
            return None
        task = self._part(told, "task")
        kind, index = task.get("type"), task.get("index", 0)
        own = [number for number, each in enumerate(places) if each[0] == kind]
        if not own:
            raise UsageError(
                f"{self.name}: this is {kind!r}, and only {', '.join(self.kinds)} "
                f"train{_NOT}"
            )
        # Some write it as a text.
        if str(index) not in map(str, range(len(own))):
            raise UsageError(
                f"{self.name}: there is no {kind} {index!r} of {len(own)}{_NOT}"
            )
        first = places[0][2]
        return Place(
            (len(places), self.name),
            (own[int(index)], self.name),
            _rendezvous(first if ":" in first else f"{first}:{_PORT}", self.name),
        )

    def _part(self, told: dict[str, Any] | None, name: str) -> dict[str, Any]:
        part = (told or {}).get(name, {})
        if not isinstance(part, dict):
            raise UsageError(f"{self.name}: {name!r} is not an object{_NOT}")
        return part

    def _replicas(self, cluster: dict[str, Any], kind: str) -> list[str]:
        replicas = cluster.get(kind, [])
        if not isinstance(replicas, list) or not all(
            isinstance(each, str) and each for each in replicas
        ):
            raise UsageError(f"{self.name}: {kind!r} is not a list of addresses{_NOT}")
        return replicas


def _from_pytorchs(variables: Mapping[str, str]) -> Place | None:
    """PyTorch's variables, which count nodes where there is no local rank."""
    if "LOCAL_RANK" in variables or not variables.get("MASTER_ADDR"):
        return None
    if not variables.get("WORLD_SIZE"):
        return None
    nodes = _number(variables, "WORLD_SIZE", 1, _MOST_NODES)
    if nodes == 1:
        return None
    why = f"WORLD_SIZE={nodes}"
    return Place(
        (nodes, "WORLD_SIZE"),
        _number_of_node(variables, "RANK", nodes, why),
        _beside(variables, "MASTER_ADDR", "MASTER_PORT", why),
    )


# The first that tells of several nodes counts.
_LOOKS: tuple[Callable[[Mapping[str, str]], Place | None], ...] = (
    _from_pet,
    _from_sagemaker,
    # The third of its pools has servers, and the fourth evaluates.
    _Cluster("CLUSTER_SPEC", ("workerpool0", "workerpool1")),
    _Cluster("TF_CONFIG", ("chief", "master", "worker")),
    _from_pytorchs,
)

# Behind each complaint.
_NOT = ". Options of khvdrun win; --nnodes 1 is for this host alone"


def _completion_index(variables: Mapping[str, str]) -> tuple[int, str] | None:
    """This pod's number in an Indexed Job."""
    name = "JOB_COMPLETION_INDEX"
    if name not in variables:
        return None
    return _number(variables, name, 0, _MOST_NODES), name


def _number_of_node(
    variables: Mapping[str, str], name: str, nodes: int, why: str
) -> tuple[int, str]:
    _text(variables, name, why)
    number = _number(variables, name, 0, _MOST_NODES)
    if number >= nodes:
        raise UsageError(f"{name}={number} and {why} contradict each other{_NOT}")
    return number, name


def _beside(
    variables: Mapping[str, str], host: str, port: str, why: str
) -> tuple[str, str]:
    """A place beside PyTorch's own, at the port after it."""
    name = _text(variables, host, why)
    _text(variables, port, why)
    number = _number(variables, port, 1, _LARGEST_PORT - 1)
    return _rendezvous(str(Address(name, number + 1)), f"{host}, {port}")


def _rendezvous(place: str, where: str) -> tuple[str, str]:
    try:
        return values.rendezvous(place), where
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{where}: {error}{_NOT}") from None


def _text(variables: Mapping[str, str], name: str, why: str) -> str:
    text = variables.get(name)
    if not text:
        raise UsageError(f"{why}, but {name} is not set{_NOT}")
    return text


def _number(variables: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = variables[name]
    # int() also takes "1_0", and refuses texts of thousands of digits.
    is_number = len(text) < 10 and text.isascii() and text.isdecimal()
    if not is_number or not least <= int(text) <= most:
        raise UsageError(
            f"{name}={text!r} is not a number from {least} to {most}{_NOT}"
        )
    return int(text)


def _json(variables: Mapping[str, str], name: str, kind: type) -> Any:
    """The value of a variable; None if it is not set."""
    if not variables.get(name):
        return None
    try:
        told = json.loads(variables[name])
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not JSON ({error}){_NOT}") from None
    if not isinstance(told, kind):
        what = "array" if kind is list else "object"
        raise UsageError(f"{name} is not a JSON {what}{_NOT}")
    return told


def _visible_gpus(variables: Mapping[str, str]) -> int:
    """The number of GPUs of this host, or container, that are not hidden."""
    if "CUDA_VISIBLE_DEVICES" in variables:
        shown = variables["CUDA_VISIBLE_DEVICES"].split(",")
        # CUDA sees none behind one that does not exist.
        hidden = next((at for at, each in enumerate(shown) if each in ("", "-1")), None)
        return len(shown[:hidden])
    return len([*Path("/dev").glob("nvidia[0-9]*")])
