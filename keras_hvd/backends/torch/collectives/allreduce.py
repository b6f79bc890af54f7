"""Allreduce: every rank gets the same reduced tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keras_hvd.backends.compression import require_compressor
from keras_hvd.backends.reduce_op import Average, ReduceOp, Sum, chosen, scales_of
from keras_hvd.backends.torch.collectives import calls
from keras_hvd.backends.torch.collectives.tensors import copies, dense
from keras_hvd.backends.torch.compression import Compression
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> torch.Tensor:
    """Reduces a tensor element by element over the ranks.

    Differentiable for Sum and Average: the gradient is reduced in the same way.

    Args:
        tensor: a tensor, Keras variable, array, list or number, with the same shape and
            type on every rank. It stays as it is.
        average: True means `op=Average`, False `op=Sum`. Pass either this or `op`.
        device_dense: without effect.
        device_sparse: without effect.
        compression: how the tensor is compressed for sending:
            `keras_hvd.Compression.none`, `fp16` or `bf16`.
        op: `keras_hvd.Average` (the default), `Sum`, `Min`, `Max`, `Product` or
            `Adasum`. Averages of integers are rounded towards zero. bool takes Min, Max
            and Product. Adasum takes floating types, and 1, 2, 4, 8... ranks.
        prescale_factor: multiplies each rank's elements before the reduction; integers
            are rounded towards zero. For integers, both factors must be finite.
        postscale_factor: multiplies the result.
        name: matches the tensor between ranks.
        process_set: the ranks that take part; by default all of them.
        ignore_name_scope: without effect.

    Returns:
        A tensor of the same shape, type and device, equal bit for bit on all ranks.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: the element type is not supported, the tensor is sparse, `average` is
            not a bool, a factor is not a number, or `compression` is not a compressor.
        ValueError: `op` is not a reduction, `average` is passed too, or the process set
            is not part of the job.
        MismatchError: the ranks' requests do not match, or `op` does not take the type.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.allreduce([1.0, 2.0], op=keras_hvd.Sum, postscale_factor=10.0)
    tensor([10., 20.])
    """
    calls.require_unused(
        "allreduce",
        device_dense=device_dense,
        device_sparse=device_sparse,
        ignore_name_scope=ignore_name_scope,
    )
    [reduced] = _noted(
        "allreduce",
        [tensor],
        chosen("allreduce", average, op),
        scales_of("allreduce", prescale_factor, postscale_factor),
        compression,
        name,
        process_set,
    )
    return reduced


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[torch.Tensor]:
    """Reduces several tensors as one group: all or none.

    Args:
        tensors: as for `allreduce`; types and shapes may be mixed.
        average: True means `op=Average`, False `op=Sum`. Pass either this or `op`.
        device_dense: without effect.
        device_sparse: without effect.
        compression: how the tensors are compressed for sending.
        op: as for `allreduce`; Adasum treats each tensor separately.
        prescale_factor: multiplies each rank's elements before the reduction.
        postscale_factor: multiplies the results.
        process_set: the ranks that take part; by default all of them.
        ignore_name_scope: without effect.
        name: matches the group between ranks.

    Returns:
        The results, in the order of `tensors`.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError, ValueError: as for `allreduce`.
        MismatchError: the ranks' requests do not match.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.grouped_allreduce([1.5, 2], op=keras_hvd.Max)
    [tensor(1.5000), tensor(2)]
    """
    calls.require_unused(
        "grouped_allreduce",
        device_dense=device_dense,
        device_sparse=device_sparse,
        ignore_name_scope=ignore_name_scope,
    )
    return _noted(
        "grouped_allreduce",
        tensors,
        chosen("grouped_allreduce", average, op),
        scales_of("grouped_allreduce", prescale_factor, postscale_factor),
        compression,
        name,
        process_set,
    )


def average_of_gradients(
    gradients: Sequence[torch.Tensor],
    kind: str,
    name: str | None,
    process_set: ProcessSet,
) -> list[torch.Tensor | None]:
    """Averages the gradients of a collective's results over the ranks.

    Results that are no floating or complex numbers have none.
    """
    smooth = [grad.is_floating_point() or grad.is_complex() for grad in gradients]
    given = [
        torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
        for grad, has_gradient in zip(gradients, smooth, strict=True)
        if has_gradient
    ]
    of_gradient = name_of_gradient(kind, name)
    averages = iter(
        _reduced(
            "grouped_allreduce",
            given,
            Average,
            (1.0, 1.0),
            Compression.none,
            of_gradient,
            process_set,
        )
    )
    found: list[torch.Tensor | None] = []
    for grad, has_gradient in zip(gradients, smooth, strict=True):
        average = next(averages) if has_gradient else None
        is_pairs = average is not None and grad.is_complex()
        found.append(torch.view_as_complex(average) if is_pairs else average)
    return found


def name_of_gradient(kind: str, name: str | None) -> str:
    """The name of the collective in the gradient of a collective.

    >>> name_of_gradient("allreduce", None)
    'unnamed_allreduce/gradient'
    """
    return f"{name or f'unnamed_{kind}'}/gradient"


# Dynamo would trace the engine's calls.
@torch.compiler.disable
def _noted(
    kind: str,
    tensors: Sequence[Any],
    op: ReduceOp,
    scales: tuple[float, float],
    compression: Any,
    name: str | None,
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    """What a step itself reduces."""
    require_compressor(kind, compression)
    given = [calls.as_tensor(kind, each) for each in tensors]
    results = _reduced(kind, given, op, scales, compression, name, process_set)
    number = number_of(process_set, kind)
    calls.note(given, results, number, sums=op in (Average, Sum))
    return results


def _reduced(
    kind: str,
    tensors: Sequence[torch.Tensor],
    op: ReduceOp,
    scales: tuple[float, float],
    compression: Any,
    name: str | None,
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    def reduced(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        compressed = [compression.compress(each) for each in tensors]
        sent = copies([each for each, _ in compressed])
        given = [*map(dense, sent)]
        with calls.call(kind, name, process_set) as (collectives, known, number):
            if given:
                collectives.allreduce(known, given, op, number, scales=scales)
        return [
            compression.decompress(each, context)
            for each, (_, context) in zip(sent, compressed, strict=True)
        ]

    def gradient(grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        if op not in (Average, Sum):
            raise NotImplementedError(
                f"{name or 'unnamed'!r}: {kind} with op={op.name} has no gradient, "
                "unlike Sum and Average: give it the tensor's detach()"
            )
        smooth = [each for each in grads if each.is_floating_point()]
        of_gradient = name_of_gradient(kind, name)
        reduced = iter(
            _reduced(kind, smooth, op, scales, compression, of_gradient, process_set)
        )
        return [next(reduced) if each.is_floating_point() else None for each in grads]

    return calls.with_gradient(tensors, reduced, gradient)
