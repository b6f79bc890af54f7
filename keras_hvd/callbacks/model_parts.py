"""What a model consists of."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import tensorflow as tf

from keras_hvd.optimizer.gradient_reduction import identity
from keras_hvd.optimizer.nested_optimizers import leaves_of


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """A model's layers, including nested ones and the model itself.

    Example:

    >>> [type(each).__name__ for each in layers_of(keras.Sequential())]
    ['Sequential']
    """
    return list(model._flatten_layers())


def weights_of(model: keras.Model) -> list[keras.Variable]:
    """A model's weights, and the `tf.Variable`s that its layers have in attributes.

    Keras leaves the latter out.

    Example:

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
        # Keras' own layers know themselves what they keep.
        if type(layer).__module__.startswith("keras."):
            continue
        for variable in _variables_in(layer):
            # What has no fixed shape holds what came by, such as a queue.
            if id(variable) in known or not variable.shape.is_fully_defined():
                continue
            known.add(id(variable))
            weights.append(_LayersVariable(layer, variable))
    return weights


def _variables_in(layer: keras.layers.Layer) -> Iterator[tf.Variable]:
    for each in leaves_of(list(vars(layer).values())):
        if isinstance(each, tf.Variable):
            yield each
        elif isinstance(each, tf.Module):
            yield from each.variables


class _LayersVariable(keras.Variable):
    """A `tf.Variable` of a layer, with what a weight of Keras has."""

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
