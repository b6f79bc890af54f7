"""Variables of TensorFlow in layers, which Keras does not count among their weights."""

from __future__ import annotations

import keras
import tensorflow as tf

from keras_hvd.backends.variables import leaves_of


def in_layer(layer: keras.layers.Layer) -> list[tf.Variable]:
    """The `tf.Variable`s that a layer has in attributes, also in a `tf.Module` there.

    >>> layer = keras.layers.Identity()
    >>> layer.steps = tf.Variable(0)
    >>> in_layer(layer)[0] is layer.steps
    True
    """
    found: list[tf.Variable] = []
    for each in leaves_of(list(vars(layer).values())):
        if isinstance(each, tf.Variable):
            found.append(each)
        elif isinstance(each, tf.Module):
            found += each.variables
    # A variable without a fixed shape holds passing data, such as a queue.
    return [each for each in found if each.shape.is_fully_defined()]


class LayerVariable(keras.Variable):
    """A `tf.Variable` of a layer, with the interface of a Keras weight."""

    def __init__(self, layer: keras.layers.Layer, variable: tf.Variable):
        # Keras would copy it.
        self._value = variable
        self._name = variable.name.removesuffix(":0")
        self._path = f"{layer.name}/{self._name}"
        self._shape = tuple(variable.shape)
        self._dtype = variable.dtype.name
        self._trainable = variable.trainable
        self._autocast = False
        self._aggregation = variable.aggregation.name.lower()
        self._synchronization = variable.synchronization.name.lower()
