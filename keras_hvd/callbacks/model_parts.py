"""What a model consists of: its layers, and the optimizers that train it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras


def model_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The model's compiled optimizer, and others in its attributes, lists and dicts.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> [optimizer.name for optimizer in model_optimizers(model)]
    ['sgd']
    """
    optimizers: list[Any] = []
    for value in (model.optimizer, *_leaves(list(vars(model).values()))):
        known = any(value is each for each in optimizers)
        if isinstance(value, keras.optimizers.Optimizer) and not known:
            optimizers.append(value)
    return optimizers


def _leaves(value: Any, depth: int = 3) -> Iterator[Any]:
    """The leaves of nested lists and dicts, which may contain themselves."""
    if isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            if depth:
                yield from _leaves(each, depth - 1)
    else:
        yield value


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """A model's layers, including nested ones and the model itself."""
    return list(model._flatten_layers())
