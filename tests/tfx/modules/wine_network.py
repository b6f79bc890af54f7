"""Beside the module with the run_fn, which imports it."""

import keras
import tensorflow as tf
from tensorflow_metadata.proto.v0 import schema_pb2
from tensorflow_transform.tf_metadata import schema_utils

FEATURES = ["a", "b", "c"]
LABEL = "y"


def features() -> dict:
    number = tf.io.FixedLenFeature([1], tf.float32)
    return {name: number for name in (*FEATURES, LABEL)}


def schema() -> schema_pb2.Schema:
    return schema_utils.schema_from_feature_spec(features())


def make() -> keras.Model:
    inputs = {name: keras.Input([1], name=name) for name in FEATURES}
    x = keras.layers.Concatenate()([inputs[name] for name in FEATURES])
    x = keras.layers.Dense(5, "tanh", kernel_initializer=keras.initializers.Ones())(x)
    start = keras.initializers.GlorotUniform(seed=3)
    return keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=start)(x))


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)
