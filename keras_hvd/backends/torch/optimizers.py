"""Refuses optimizers and gradients that a distributed optimizer must not take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from keras_hvd.backends.gradient_reduction import GradientReduction


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
    """Does nothing: no function of keras_hvd reduces tensors of torch besides.

    >>> require_not_reduced(None, [], GradientReduction())
    """
