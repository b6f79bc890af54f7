"""Refuses optimizers and gradients that a distributed optimizer must not take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.backends.reduce_op import Sum
from keras_hvd.backends.torch.collectives import reductions
from keras_hvd.job.process_sets import number_of


def refuse_session_optimizer(optimizer: Any) -> None:
    """Raises TypeError if it is an optimizer of torch.

    >>> refuse_session_optimizer("adam")
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(
            f"DistributedOptimizer takes a Keras 3 optimizer; got torch.optim.{kind}. "
            f"Use one of keras.optimizers, such as keras.optimizers.{kind}."
        )


def require_not_reduced(
    optimizer: Any, grads: Iterable[Any], reduction: GradientReduction
) -> None:
    """Raises if an optimizer that sums gets gradients that the step itself has summed.

    Averaging equal values changes nothing. Arithmetic makes new tensors, which are not
    known.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> optimizer, summing = keras.optimizers.SGD(), GradientReduction(op=Sum)
    >>> require_not_reduced(optimizer, [torch.ones(1)], summing)
    >>> require_not_reduced(optimizer, [keras_hvd.allreduce([1.0])], summing)
    Traceback (most recent call last):
    RuntimeError: optimizer 'sgd' sums gradients over the ranks, and was given ...
    """
    if reduction.op != Sum:
        return
    number = number_of(reduction.process_set, "the reduction of gradients")
    if any(reductions.mark_of(each) == number for each in grads):
        raise RuntimeError(
            f"optimizer {optimizer.name!r} sums gradients over the ranks, and was "
            "given gradients that the step itself has reduced, with an allreduce: "
            f"they would be summed twice, {reduction.process_set.size()} times too "
            "large. Give the optimizer the gradients that backward() computes."
        )
