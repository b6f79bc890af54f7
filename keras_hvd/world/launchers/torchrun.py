"""PyTorch's `torchrun`, whose ranks meet beside its own store."""

from __future__ import annotations

from collections.abc import Mapping

from keras_hvd.world.launchers.launcher import World
from keras_hvd.world.launchers.variables import (
    RENDEZVOUS,
    Names,
    integer,
    is_one_host,
    on_any_hosts,
    on_one_host,
    text_of,
)
from keras_hvd.world.rendezvous import address

_TOO_LARGE_PORT = 2**16


def is_here(variables: Mapping[str, str]) -> bool:
    """Whether `torchrun` has started the process that has these variables.

    >>> is_here({"TORCHELASTIC_RUN_ID": "r17"})
    True
    """
    return "TORCHELASTIC_RUN_ID" in variables


def world(variables: Mapping[str, str]) -> World:
    """The place from `torchrun` for this process. Raises LaunchEnvironmentError."""
    store, port = text_of(variables, "MASTER_ADDR"), variables.get("MASTER_PORT")
    beside = beside_its_store(variables)
    job = f"torchrun-{variables['TORCHELASTIC_RUN_ID']}-{store}-{port}"
    rendezvous = variables.get(RENDEZVOUS)
    names = Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if is_one_host(variables, names) and not rendezvous:
        return on_one_host(variables, names, job)
    return on_any_hosts(variables, names, job, rendezvous or beside)


def beside_its_store(variables: Mapping[str, str]) -> str:
    """HOST:PORT beside PyTorch's own store. Raises LaunchEnvironmentError.

    >>> beside_its_store({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    'node0:29501'
    """
    store = text_of(variables, "MASTER_ADDR")
    port = integer(variables, "MASTER_PORT", 1, _TOO_LARGE_PORT)
    beside = port + 1 if port + 1 < _TOO_LARGE_PORT else port - 1
    return str(address.Address(store, beside))
