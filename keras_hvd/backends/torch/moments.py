"""Mean and variance over all ranks' rows, for SyncBatchNormalization."""

from __future__ import annotations

import math
from typing import Any

import torch
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_hvd.backends.dense_collectives import Together
from keras_hvd.backends.reduce_op import Sum
from keras_hvd.backends.torch.collectives.tensors import copies, dense
from keras_hvd.job.process_sets import ProcessSet, number_of


# Dynamo would trace the engine's calls.
@torch.compiler.disable
def moments_over_ranks(
    inputs: torch.Tensor,
    mask: torch.Tensor | None,
    axes: list[int],
    name: str,
    process_set: ProcessSet,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of each channel over the rows of all ranks.

    Each rank contributes its number of elements, their mean, and the sum of their
    squared deviations from it. Unlike sums of squares, these add up without
    cancellation.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> world = keras_hvd.global_process_set
    >>> inputs = torch.tensor([[1.0], [3.0]])
    >>> moments_over_ranks(inputs, None, [0], "moments", world)
    (tensor([2.]), tensor([1.]))
    """
    if mask is not None:
        mask = mask.to(torch.bool)[..., None].expand(inputs.shape)
    of_channel = [1 if axis in axes else -1 for axis in range(inputs.ndim)]
    count = _count(inputs, mask, axes)
    mean = _ratio(_masked(inputs, mask).sum(axes), count)
    squares = _masked(inputs - mean.reshape(of_channel), mask).square().sum(axes)
    own = torch.stack([count, mean, squares])
    if in_symbolic_scope():
        # The model is only described, which other ranks need not do.
        of_ranks = own[None]
    else:
        of_ranks = _Gathered.apply(own, name, process_set)
    counts, means, squares = of_ranks.unbind(dim=1)
    # A rank without rows gives a count of 0.
    count = counts.sum(0)
    mean = _ratio((counts * means).sum(0), count)
    between = counts * (means - mean).square()
    return mean, _ratio((squares + between).sum(0), count)


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks; backward adds up what all ranks' losses make of one."""

    @staticmethod
    def forward(
        context: Any, own: torch.Tensor, name: str, process_set: ProcessSet
    ) -> torch.Tensor:
        context.name, context.process_set = name, process_set
        of_ranks = own.new_zeros((process_set.size(), *own.shape))
        if process_set.included():
            of_ranks[process_set.rank()] = own
        return _summed(of_ranks, name, process_set)

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        [grad] = grads
        process_set = context.process_set
        grad = _summed(grad, f"{context.name}/gradient", process_set)
        return grad[process_set.rank()], None, None


def _summed(tensor: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    [copy] = copies([tensor])
    number = number_of(process_set, "the moments")
    with Together() as collectives:
        collectives.allreduce(name, [dense(copy)], Sum, number)
    return copy.to(tensor.device)


def _count(
    inputs: torch.Tensor, mask: torch.Tensor | None, axes: list[int]
) -> torch.Tensor:
    """The number of elements of each channel."""
    if mask is not None:
        return mask.sum(axes).to(inputs.dtype)
    [channels] = [n for axis, n in enumerate(inputs.shape) if axis not in axes]
    rows = math.prod(n for axis, n in enumerate(inputs.shape) if axis in axes)
    return inputs.new_full((channels,), rows)


def _masked(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return values if mask is None else torch.where(mask, values, 0)


def _ratio(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """A mean, and 0 where there is nothing."""
    return total / count.clamp(min=1)
