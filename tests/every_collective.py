"""Every collective, as a call that all ranks can make.

The tests of all collectives go through this list. A collective that is not in it fails
test_every_collective.py.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras_hvd

# By name: the arguments for a tensor whose rows divide evenly among the ranks.
ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "allreduce": lambda x: {"tensor": x},
    "grouped_allreduce": lambda x: {"tensors": [x, x[:1]]},
    "allgather": lambda x: {"tensor": x},
    "grouped_allgather": lambda x: {"tensors": [x, x[:1]]},
    "broadcast": lambda x: {"tensor": x, "root_rank": 0},
    "barrier": lambda x: {},
    "reducescatter": lambda x: {"tensor": x},
    "grouped_reducescatter": lambda x: {"tensors": [x, x[:1]]},
    "alltoall": lambda x: {"tensor": x},
}
OF_ONE_TENSOR = tuple(name for name in ARGUMENTS if "tensor" in ARGUMENTS[name]([]))


def call(function: str, x: Any, **more: Any) -> Any:
    """The result of a collective of a tensor, or of a group that begins with it."""
    return getattr(keras_hvd, function)(**ARGUMENTS[function](x) | more)


def takes(function: str, argument: str) -> bool:
    return argument in inspect.signature(getattr(keras_hvd, function)).parameters
