"""The layers and weights of a model."""

from __future__ import annotations

import keras

from keras_hvd.backends.current import framework
from keras_hvd.backends.variables import identity


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """A model's layers, including nested ones and the model itself.

    Example:

    >>> [type(each).__name__ for each in layers_of(keras.Sequential())]
    ['Sequential']
    """
    return list(model._flatten_layers())


def weights_of(model: keras.Model) -> list[keras.Variable]:
    """A model's weights, and those of the framework that its layers have in attributes.

    Keras leaves the latter out.

    Example:

    >>> import tensorflow as tf
    >>> class Counts(keras.layers.Layer):
    ...     def __init__(self):
    ...         super().__init__(name="counts")
    ...         self.steps = tf.Variable(0, trainable=False, name="steps")
    >>> [each.path for each in weights_of(keras.Sequential([Counts()]))]
    ['counts/steps']
    """
    weights = list(model.weights)
    known = set(map(identity, weights))
    for layer in layers_of(model):
        for variable in framework.layer_variables.in_layer(layer):
            if identity(variable) not in known:
                known.add(identity(variable))
                weights.append(variable)
    return weights
