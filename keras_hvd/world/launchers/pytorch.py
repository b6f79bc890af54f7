"""Launchers that give each process the variables by which PyTorch's processes meet.

Azure Machine Learning does, and many scripts of users do.
"""

from __future__ import annotations

from collections.abc import Mapping

from keras_hvd.world.launchers import torchrun
from keras_hvd.world.launchers.launcher import World
from keras_hvd.world.launchers.variables import RENDEZVOUS, Names, on_any_hosts

# Without a local rank, they count nodes.
_THEIRS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_here(variables: Mapping[str, str]) -> bool:
    """Whether a process with these variables is one of several for PyTorch.

    >>> is_here({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
    ...     "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105"})
    True
    >>> is_here({"RANK": "0", "WORLD_SIZE": "2"})
    False
    """
    return all(name in variables for name in _THEIRS)


def world(variables: Mapping[str, str]) -> World:
    """The place from them for this process. Raises LaunchEnvironmentError."""
    rendezvous = variables.get(RENDEZVOUS) or torchrun.beside_its_store(variables)
    known = "LOCAL_WORLD_SIZE" if variables.get("LOCAL_WORLD_SIZE") else ""
    names = Names("RANK", "WORLD_SIZE", "LOCAL_RANK", known)
    return on_any_hosts(variables, names, "", rendezvous)
