"""Reduction of a step's gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from keras_hvd.backends.dense_collectives import Together
from keras_hvd.backends.gradient_reduction import KIND, GradientReduction
from keras_hvd.backends.torch.collectives.tensors import dense
from keras_hvd.backends.torch.eager import only_alone as only_alone  # of the interface
from keras_hvd.backends.torch.eager import size_of
from keras_hvd.backends.torch.gradients import during_backward
from keras_hvd.backends.torch.gradients.during_backward import (
    has_reduced as has_reduced,
)
from keras_hvd.backends.torch.gradients.during_backward import install as install
from keras_hvd.backends.torch.gradients.step_reduction import StepReduction, reducible
from keras_hvd.backends.variables import identity
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

    Raises TypeError or NotImplementedError if keras_hvd cannot reduce one of the
    gradients. Others may have been sent by then, and are reduced.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> weight = keras.Variable([1.0, 2.0], name="weight")
    >>> reduce(GradientReduction(), "sgd", [torch.ones(2)], [weight])
    [tensor([1., 1.])]
    """
    if recorder.scaling() == "meet":
        return _meet(reduction, prefix, grads)
    results = [
        _scale_local(reduction, grad) if identity(variable) in local else grad
        for grad, variable in zip(grads, variables, strict=True)
    ]
    shared = [i for i, each in enumerate(variables) if identity(each) not in local]
    given = [results[i] for i in shared], [variables[i] for i in shared]
    early = during_backward.take(prefix)
    if early is not None:
        reduced = early.finish(*given)
    else:
        reduced = _reduce(reduction, prefix, *given, agreed)
    for i, result in zip(shared, reduced, strict=True):
        results[i] = result
    return results


def _meet(
    reduction: GradientReduction, prefix: str, grads: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Waits for the other ranks once the gradients are computed. Reduces nothing."""
    sent = torch.zeros(1, device=grads[0].device if grads else "cpu")
    with Together() as collectives:
        collectives.allreduce(
            f"{prefix}/meeting",
            [dense(sent)],
            reduction.op,
            number_of(reduction.process_set, KIND),
        )
    return list(grads)


def _reduce(
    reduction: GradientReduction,
    prefix: str,
    grads: Sequence[Any],
    variables: Sequence[Any],
    agreed: str,
) -> list[torch.Tensor]:
    # All of them, before one is sent.
    dense = [
        reducible(reduction, grad, variable)
        for grad, variable in zip(grads, variables, strict=True)
    ]
    sizes = [grad.numel() * grad.element_size() for grad in dense]
    step = StepReduction(reduction, prefix, variables, sizes, agreed)
    apart = _apart(dense)
    try:
        for place in reversed(range(len(apart))):
            step.give(place, apart[place])
    except BaseException:
        step.abandon()
        raise
    results = step.finish()
    return [results[place] for place in range(len(apart))]


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
