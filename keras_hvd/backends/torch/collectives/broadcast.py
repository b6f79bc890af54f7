"""Broadcast: every rank gets one rank's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keras_hvd.backends import equal_start
from keras_hvd.backends.torch.collectives import calls
from keras_hvd.backends.torch.collectives.allreduce import average_of_gradients
from keras_hvd.backends.torch.collectives.tensors import copies, dense
from keras_hvd.job import basics
from keras_hvd.job.process_sets import ProcessSet, global_process_set


# Dynamo would trace the engine's calls.
@torch.compiler.disable
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Gives every rank the tensor of the root rank.

    Differentiable: the root gets the average of all ranks' gradients, the others get
    zeros, as in Horovod.

    Args:
        tensor: a tensor, variable, array, list or number, with the same shape and type
            on every rank.
        root_rank: the rank that sends its tensor, as numbered in the whole job.
        name: matches the tensor between ranks.
        ignore_name_scope: without effect.
        process_set: the ranks that take part; by default all of them.

    Returns:
        The root's tensor.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: the element type is not supported, or `root_rank` is not an integer.
        ValueError: the process set is not part of the job, or there is no such root.
        MismatchError: the ranks' requests do not match.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.broadcast([1, 2], root_rank=0)
    tensor([1, 2])
    """
    calls.require_unused("broadcast", ignore_name_scope=ignore_name_scope)
    given = calls.as_tensor("broadcast", tensor)
    root = basics.root_of("broadcast", root_rank)

    def sent(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        [copy] = copies(tensors)
        with calls.call("broadcast", name, process_set) as (collectives, known, number):
            collectives.broadcast(known, dense(copy), root, number)
        return [copy]

    def gradient(grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        [average] = average_of_gradients(grads, "broadcast", name, process_set)
        if average is None:
            return [None]
        # Zeros alone would not depend on the average, whose own gradient all compute.
        is_root = torch.tensor(basics.rank() == root, device=average.device)
        return [torch.where(is_root, average, 0)]

    equal_start.note_broadcast()
    [received] = calls.with_gradient([given], sent, gradient)
    return received
