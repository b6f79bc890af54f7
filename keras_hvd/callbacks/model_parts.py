"""What a model consists of."""

from __future__ import annotations

import keras


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """A model's layers, including nested ones and the model itself.

    Example:

    >>> [type(each).__name__ for each in layers_of(keras.Sequential())]
    ['Sequential']
    """
    return list(model._flatten_layers())
