"""Reduction of a step's gradients, in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from keras_hvd.backends.compression import NoneCompressor
from keras_hvd.backends.gradient_reduction import KIND, GradientReduction
from keras_hvd.backends.host_collectives import HostTensor, Together
from keras_hvd.backends.labels import labels_of
from keras_hvd.backends.torch.collectives.tensors import is_dense, on_host
from keras_hvd.backends.torch.eager import only_alone as only_alone  # of the interface
from keras_hvd.backends.torch.eager import size_of
from keras_hvd.backends.variables import identity, path
from keras_hvd.job.process_sets import number_of
from keras_hvd.recording import recorder


def reduce(
    reduction: GradientReduction,
    prefix: str,
    grads: Sequence[torch.Tensor],
    variables: Sequence[Any],
    local: Collection[int] = (),
    agreed: str = "",
) -> list[torch.Tensor]:
    """Reduces the gradients of variables over the ranks.

    `prefix` begins the names that match gradients between ranks, in the order of
    `variables`, whose labels the ranks compare. `local` holds the `identity` of each
    variable whose gradients stay on their rank. `agreed` describes further settings
    that must be equal on all ranks.

    Raises TypeError or NotImplementedError, and reduces nothing, if keras_hvd cannot
    reduce one of the gradients.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> weight = keras.Variable([1.0, 2.0], name="weight")
    >>> reduce(GradientReduction(), "sgd", [torch.ones(2)], [weight])
    [tensor([1., 1.])]
    """
    if recorder.scaling() == "meet":
        return _meet(reduction, prefix, grads)
    results = list(grads)
    shared = []
    for i, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
        if identity(variable) in local:
            results[i] = _scale_local(reduction, grad)
        else:
            results[i] = _reducible(reduction, grad, variable)
            shared.append(i)
    reduced = _reduce(
        reduction,
        f"{prefix}/gradients",
        _apart([results[i] for i in shared]),
        [variables[i] for i in shared],
        [agreed] * bool(agreed),
    )
    for i, result in zip(shared, reduced, strict=True):
        results[i] = result
    return results


def _meet(
    reduction: GradientReduction, prefix: str, grads: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Waits for the other ranks once the gradients are computed. Reduces nothing."""
    sent = np.zeros(1, np.float32)
    with Together() as collectives:
        collectives.allreduce(
            f"{prefix}/meeting",
            [HostTensor.of_array(sent)],
            reduction.op,
            number_of(reduction.process_set, KIND),
        )
    return list(grads)


def _reduce(
    reduction: GradientReduction,
    prefix: str,
    grads: list[torch.Tensor],
    variables: list[Any],
    agreed: list[str],
) -> list[torch.Tensor]:
    factor = reduction.gradient_predivide_factor
    if factor != 1:
        agreed = [*agreed, f"predivided by {factor!r}"]
        grads = [grad.div_(factor) for grad in grads]
    pairs = [_compressed(reduction, grad) for grad in grads]
    labels = [
        _label(label, grad)
        for label, grad in zip(labels_of([*map(path, variables)]), grads, strict=True)
    ]
    sizes = [grad.numel() * grad.element_size() for grad in grads]
    number = number_of(reduction.process_set, KIND)
    # A rank without gradients compares labels, with a number for nothing.
    nothing = np.zeros(1, np.float32)
    with Together() as collectives:
        for place, bucket in enumerate(reduction.buckets(variables, sizes) or [[]]):
            collectives.allreduce(
                f"{prefix}/{place}",
                [on_host(pairs[i][0]) for i in bucket]
                or [HostTensor.of_array(nothing)],
                reduction.op,
                number,
                "\n".join([*(labels[i] for i in bucket), *agreed]),
            )
    decompress = reduction.compression.decompress
    results = [decompress(sent, context) for sent, context in pairs]
    return [each.mul_(factor) for each in results] if factor != 1 else results


def _compressed(
    reduction: GradientReduction, grad: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """The tensor to send, without gaps, and what restores the gradient from it."""
    if reduction.compression is NoneCompressor:
        return grad, None
    sent, context = reduction.compression.compress(grad)
    return (sent if is_dense(sent) else sent.contiguous()), context


def _label(label: str, grad: torch.Tensor) -> str:
    """A gradient's label: elements are reduced in the order of memory."""
    if grad.is_contiguous():
        return label
    return f"{label} with strides {grad.stride()}"


def _reducible(reduction: GradientReduction, grad: Any, variable: Any) -> torch.Tensor:
    """A gradient in host memory without gaps: itself, if possible."""
    if not isinstance(grad, torch.Tensor):
        raise TypeError(
            f"the gradient of {path(variable)!r} must be a tensor of torch; got "
            f"{type(grad).__module__}.{type(grad).__qualname__}"
        )
    if grad.layout != torch.strided:
        if not reduction.sparse_as_dense:
            raise NotImplementedError(
                f"the gradient of {path(variable)!r} is sparse, which keras_hvd does "
                "not reduce on torch: pass sparse_as_dense=True to "
                "DistributedOptimizer, or make the layer with sparse=False"
            )
        grad = grad.to_dense()
    if grad.device.type != "cpu":
        raise NotImplementedError(
            f"the gradient of {path(variable)!r} is on {grad.device}, and on torch "
            "keras_hvd reduces gradients in host memory alone: set the environment "
            "variable KERAS_TORCH_DEVICE=cpu"
        )
    if grad.is_complex():
        raise NotImplementedError(
            f"the gradient of {path(variable)!r} has the type {grad.dtype}, which "
            "cannot be reduced: keep the real and the imaginary part in two variables"
        )
    return grad if is_dense(grad) else grad.contiguous()


def _apart(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients, with copies of those that share memory with another.

    torch.autograd.grad may return one tensor for several variables.
    """
    apart = list(grads)
    end = 0
    for i in sorted(range(len(grads)), key=lambda i: grads[i].data_ptr()):
        start = grads[i].data_ptr()
        if start < end:
            apart[i] = grads[i].clone()
        end = max(end, start + grads[i].numel() * grads[i].element_size())
    return apart


def _scale_local(reduction: GradientReduction, grad: torch.Tensor) -> torch.Tensor:
    """Scales a local gradient like the others, which are means over all ranks."""
    if not reduction.scale_local_gradients:
        return grad
    return grad / size_of(number_of(reduction.process_set, KIND))
