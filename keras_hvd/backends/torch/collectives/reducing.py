"""Reduction of tensors and Keras variables, for metrics, statistics and flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keras_hvd.backends.host_collectives import Together
from keras_hvd.backends.reduce_op import ReduceOp
from keras_hvd.backends.torch.collectives.tensors import copy_on_host, on_host
from keras_hvd.job import arrival
from keras_hvd.job.process_sets import ProcessSet, number_of


def allreduce(
    tensor: Any, *, op: ReduceOp, name: str, process_set: ProcessSet
) -> torch.Tensor:
    """Reduces one tensor, which stays as it is; see `grouped_allreduce`.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> world = keras_hvd.global_process_set
    >>> allreduce(torch.ones(2), op=ReduceOp.Sum, name="sums", process_set=world)
    tensor([1., 1.])
    """
    [reduced] = grouped_allreduce([tensor], op=op, name=name, process_set=process_set)
    return reduced


def grouped_allreduce(
    tensors: Sequence[Any], *, op: ReduceOp, name: str, process_set: ProcessSet
) -> list[torch.Tensor]:
    """Reduces several tensors or Keras variables as one group: all or none.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> world = keras_hvd.global_process_set
    >>> grouped_allreduce(
    ...     [torch.ones(1)], op=ReduceOp.Sum, name="sums", process_set=world)
    [tensor([1.])]
    """
    arrival.require_arrived("grouped_allreduce")
    number = number_of(process_set, "grouped_allreduce")
    copies = [copy_on_host(each) for each in tensors]
    with Together() as collectives:
        collectives.allreduce(name, [*map(on_host, copies)], op, number)
    devices = [getattr(each, "value", each).device for each in tensors]
    return [copy.to(device) for copy, device in zip(copies, devices, strict=True)]
