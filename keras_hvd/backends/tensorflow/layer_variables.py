"""Variables of TensorFlow in layers, which Keras does not count among their weights."""

from __future__ import annotations

import keras
import tensorflow as tf

from keras_hvd.backends.variables import leaves_of


def in_layer(layer: keras.layers.Layer) -> list[LayerVariable]:
    """The `tf.Variable`s in a layer's attributes, also in a `tf.Module`.

    Keras may hold one in several places, where it is found each time.

    >>> class Counts(keras.layers.Layer):
    ...     pass
    >>> layer = Counts(name="counts")
    >>> layer.steps = tf.Variable(0, name="steps")
    >>> {each.path for each in in_layer(layer)}
    {'counts/steps'}
    """
    # Keras' own layers track all their variables.
    if type(layer).__module__.startswith("keras."):
        return []
    found: list[tf.Variable] = []
    for each in leaves_of(list(vars(layer).values())):
        if isinstance(each, tf.Variable):
            found.append(each)
        elif isinstance(each, tf.Module):
            found += each.variables
    # A variable without a fixed shape holds passing data, such as a queue.
    fixed = [each for each in found if each.shape.is_fully_defined()]
    return [LayerVariable(layer, each) for each in fixed]


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
