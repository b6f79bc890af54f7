"""Allgather: every rank gets the concatenation of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keras_hvd.backends.torch import gpu
from keras_hvd.backends.torch.collectives import calls
from keras_hvd.backends.torch.collectives.allreduce import average_of_gradients
from keras_hvd.backends.torch.collectives.tensors import copies, dense
from keras_hvd.job import arrival
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Concatenates the ranks' tensors along their first dimension.

    Differentiable: each rank gets its rows of the average of all ranks' gradients, as
    in Horovod.

    Args:
        tensor: a tensor, variable, array or list with at least one dimension. The first
            may differ between ranks, and may be zero; the others and the type may not.
        name: matches the tensor between ranks.
        ignore_name_scope: without effect.
        process_set: the ranks that take part; by default all of them.

    Returns:
        The rows of the lowest rank, then those of the next rank, and so on.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: the element type is not supported.
        ValueError: `tensor` is a scalar, or the process set is not part of the job.
        MismatchError: the ranks' requests do not match.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.allgather([[1, 2], [3, 4]])
    tensor([[1, 2],
            [3, 4]])
    """
    calls.require_unused("allgather", ignore_name_scope=ignore_name_scope)
    [gathered] = _gathered("allgather", [tensor], name, process_set)
    return gathered


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Concatenates several tensors over the ranks as one group: all or none.

    Differentiable: each rank gets its rows of the averages of all ranks' gradients, as
    in Horovod.

    Args:
        tensors: as for `allgather`; types and shapes may be mixed.
        name: matches the group between ranks.
        ignore_name_scope: without effect.
        process_set: the ranks that take part; by default all of them.

    Returns:
        The results, in the order of `tensors`.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError, ValueError: as for `allgather`.
        MismatchError: the ranks' requests do not match.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.grouped_allgather([[1, 2], [[0.5]]])
    [tensor([1, 2]), tensor([[0.5000]])]
    """
    calls.require_unused("grouped_allgather", ignore_name_scope=ignore_name_scope)
    return _gathered("grouped_allgather", tensors, name, process_set)


# Dynamo would trace the engine's calls.
@torch.compiler.disable
def _gathered(
    kind: str, tensors: Sequence[Any], name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    arrival.require_arrived(kind)
    number, size = number_of(process_set, kind), process_set.size()
    given = [calls.as_tensor(kind, each) for each in tensors]
    for each in given:
        if each.ndim == 0:
            raise ValueError(
                f"{kind} joins tensors along their first dimension, and a scalar has "
                f"none: give it one, with x.reshape(1); got {each}"
            )
    # Each tensor's rows of each rank; the engine asks for no memory for none.
    rows = [[0] * size for _ in given]

    def gathered(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sent = copies(tensors)
        results = [each[:0] for each in sent]

        def allocate(place: int, first_dims: list[int]) -> int:
            rows[place] = first_dims
            shape = (sum(first_dims), *sent[place].shape[1:])
            # Another thread may call this, which has another stream.
            with torch.cuda.stream(stream):
                results[place] = sent[place].new_empty(shape)
            return results[place].data_ptr()

        with calls.call(kind, name, process_set) as (collectives, known, number):
            if sent:
                stream = gpu.stream_of(sent[0])
                collectives.allgather(known, [*map(dense, sent)], allocate, number)
        return results

    def gradient(grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        own = process_set.rank()
        averages = average_of_gradients(grads, kind, name, process_set)
        return [
            # A part would keep all ranks' rows in memory.
            None if average is None else average.split(counts)[own].clone()
            for average, counts in zip(averages, rows, strict=True)
        ]

    results = calls.with_gradient(
        given, gathered, gradient, described=lambda each: torch.cat([each] * size)
    )
    calls.note(given, results, number, sums=False)
    return results
