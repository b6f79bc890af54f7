"""Buffers of torch's modules in layers, which Keras does not count among weights."""

from __future__ import annotations

import keras
import torch


def in_layer(layer: keras.layers.Layer) -> list[LayerVariable]:
    """The buffers of a module of torch that a layer wraps.

    >>> layer = keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(3), name="norm")
    >>> [each.path for each in in_layer(layer)]
    ['norm/running_mean', 'norm/running_var', 'norm/num_batches_tracked']
    """
    if not isinstance(layer, keras.layers.TorchModuleWrapper):
        return []
    named = layer.module.named_buffers()
    return [LayerVariable(layer, name, buffer) for name, buffer in named]


class LayerVariable(keras.Variable):
    """A buffer, with the interface of a Keras weight that a layer assigns.

    Ranks average those of a floating type, such as the statistics of a BatchNorm.
    """

    def __init__(self, layer: keras.layers.Layer, name: str, buffer: torch.Tensor):
        # Keras would copy it.
        self._value = buffer
        self._name = name
        self._path = f"{layer.name}/{self._name}"
        self._shape = tuple(self._value.shape)
        self._dtype = str(self._value.dtype).removeprefix("torch.")
        self._trainable = False
        self._autocast = False
        is_float = self._value.is_floating_point()
        self._aggregation = "mean" if is_float else "none"
        self._synchronization = "auto"
