"""Optimizers that delegate updates to inner optimizers."""

from __future__ import annotations

import functools
from typing import Any

import keras

from keras_hvd.backends.variables import leaves_of


def inner_optimizers(optimizer: Any) -> list[keras.optimizers.Optimizer] | None:
    """The optimizers to which one delegates updates; None if it does them itself.

    The list is empty until a `MultiOptimizer` has chosen its optimizers.

    >>> import keras
    >>> inner_optimizers(keras.optimizers.SGD()) is None
    True
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return [optimizer.inner_optimizer]
    if isinstance(optimizer, _multi_optimizer()):
        return list(optimizer.optimizers)
    return None


def leaf_optimizers(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """The optimizers that do the updates: the inner ones, or the optimizer itself.

    >>> import keras
    >>> outer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(name="inner"))
    >>> [leaf.name for leaf in leaf_optimizers(outer)]
    ['inner']
    """
    inner = inner_optimizers(optimizer)
    if inner is None:
        return [optimizer]
    return [leaf for each in inner for leaf in leaf_optimizers(each)]


def model_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The model's compiled optimizer, and others in its attributes, lists and dicts.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(name="mine"), "mse")
    >>> [optimizer.name for optimizer in model_optimizers(model)]
    ['mine']
    """
    optimizers: list[Any] = []
    for value in (model.optimizer, *leaves_of(list(vars(model).values()))):
        known = any(value is each for each in optimizers)
        if isinstance(value, keras.optimizers.Optimizer) and not known:
            optimizers.append(value)
    return optimizers


def model_leaf_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The innermost optimizers of all of the model's.

    >>> import keras
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    >>> [type(optimizer).__name__ for optimizer in model_leaf_optimizers(model)]
    ['SGD']
    """
    return [leaf for each in model_optimizers(model) for leaf in leaf_optimizers(each)]


@functools.cache
def _multi_optimizer() -> tuple[Any, ...]:
    """The `MultiOptimizer` class, or nothing if this version of Keras has none."""
    found = getattr(keras.optimizers, "MultiOptimizer", None)
    return (found,) if found else ()
