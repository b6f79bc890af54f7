"""Makes variables equal on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from keras_hvd.backends import equal_start
from keras_hvd.backends.dense_collectives import DenseTensor, Together
from keras_hvd.backends.reduce_op import ReduceOp
from keras_hvd.backends.torch.collectives.tensors import copy_on_host, dense
from keras_hvd.exceptions import MismatchError
from keras_hvd.job import arrival, basics, unnamed
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of

_turns = unnamed.Turns()


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Sets every rank's variables to the root's values.

    All broadcasts run at the same time, so many small variables cost little more than
    one.

    Args:
        variables: Keras variables, or tensors of torch, such as those of a module's
            `state_dict`. Every rank gives the same number, with the same shapes and
            types in the same order.
        root_rank: the rank that sends its values, counted in the whole job.
        process_set: the ranks that take part; by default all of them.
        inplace: accepted for compatibility; without effect.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        ValueError: the process set is not part of the job.
        TypeError: something is no variable, an element type cannot be sent, or
            `root_rank` is not a whole number.
        MismatchError: the ranks' variables or roots differ.
        RuntimeError: Keras runs on another backend on other ranks.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> weights = keras.Variable([1.0, 2.0])
    >>> keras_hvd.broadcast_variables([weights], root_rank=0)
    >>> weights.numpy()
    array([1., 2.], dtype=float32)
    """
    _broadcast("broadcast_variables", variables, root_rank, process_set)


def broadcast_(
    variables: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sets every rank's variables to the root's values, in place, and returns these.

    Args:
        variables: a variable, or several, as for `broadcast_variables`.
        root_rank: the rank that sends its values, counted in the whole job.
        name: matches the call to the other ranks' calls.
        process_set: the ranks that take part; by default all of them.

    Returns:
        The tensor of the variable, or a list of tensors.

    Raises:
        As `broadcast_variables` does.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.broadcast_(torch.tensor([1.0, 2.0]), root_rank=0)
    tensor([1., 2.])
    """
    is_one = isinstance(getattr(variables, "value", variables), torch.Tensor)
    given = [variables] if is_one else variables
    tensors = _broadcast("broadcast_", given, root_rank, process_set, name)
    return tensors[0] if is_one else tensors


# Dynamo would trace the engine's calls.
@torch.compiler.disable
def _broadcast(
    function: str,
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet,
    name: str | None = None,
) -> list[torch.Tensor]:
    arrival.require_arrived(function)
    number = number_of(process_set, function)
    root = basics.root_of(function, root_rank)
    if not isinstance(variables, Iterable) or isinstance(variables, np.ndarray):
        raise _no_variable(function, variables)
    tensors = [_tensor(function, each) for each in variables]
    values = [copy_on_host(each) for each in tensors]
    equal_start.note_broadcast()
    equal_start.require_same_backend(process_set)
    with _turns.name(function, name, number) as known:
        _require_same_number(function, known, len(values), number)
        with Together() as collectives:
            for place, value in enumerate(values):
                collectives.broadcast(f"{known}/{place}", dense(value), root, number)
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
    return tensors


def has_value(variable: Any) -> bool:
    """Whether a variable has a value.

    >>> import keras
    >>> has_value(keras.Variable(1.0))
    True
    """
    return variable._value is not None


def checksum(variable: Any) -> int:
    """A checksum of a Keras variable's value.

    >>> import keras
    >>> checksum(keras.Variable(1.0)) == checksum(keras.Variable(2.0))
    False
    """
    return zlib.crc32(bytes_of(variable.value))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements as bytes, of any type that torch has.

    >>> bytes_of(torch.zeros(2)).nbytes
    8
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _tensor(function: str, variable: Any) -> torch.Tensor:
    # Under mixed precision a layer's variable has a copy as its value.
    own = getattr(variable, "_value", None)
    tensor = getattr(variable, "value", variable) if own is None else own
    if isinstance(tensor, torch.Tensor):
        return tensor
    raise _no_variable(function, variable)


def _no_variable(function: str, given: Any) -> TypeError:
    return TypeError(
        f"{function} takes Keras variables and tensors of torch; got {given!r}"
    )


def _require_same_number(
    function: str, name: str, number: int, process_set: int
) -> None:
    """Raises, on every rank, if ranks give more variables, which would hang."""
    largest = np.array([number, -number], np.int64)
    with Together() as collectives:
        collectives.allreduce(
            f"{name}/number",
            [DenseTensor.of_array(largest)],
            ReduceOp.Max,
            process_set,
        )
    most, least = int(largest[0]), -int(largest[1])
    if most != least:
        raise MismatchError(
            f"{function}: this rank gives {number} variables; the ranks give from "
            f"{least} to {most}. Give the same variables on all ranks"
        )
