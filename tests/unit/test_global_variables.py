"""Errors of broadcast_global_variables: in TensorFlow 2, and without variables."""

import pytest
import tensorflow as tf

import keras_hvd


@pytest.fixture(autouse=True)
def job():
    keras_hvd.init()


@pytest.mark.parametrize("run", [lambda f: f, tf.function], ids=["eager", "function"])
def test_tensorflow_2_has_none(run):
    with pytest.raises(RuntimeError, match="keras_hvd.broadcast_variables.*callback"):
        run(lambda: keras_hvd.broadcast_global_variables(0))()


def test_graph_without_variables():
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="no global var"):
        keras_hvd.broadcast_global_variables(0)
