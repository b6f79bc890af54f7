"""Global variables of TensorFlow 1 graphs, in a session and by a hook."""

import numpy as np
import pytest
import tensorflow as tf

import keras_hvd

v1 = tf.compat.v1


@pytest.mark.parametrize("root", ["first", "last"])
@pytest.mark.parametrize("use_resource", [True, False])
def test_in_a_session(root, use_resource, rank, size):
    root = 0 if root == "first" else size - 1
    with tf.Graph().as_default(), v1.Session() as session:
        values = [float(rank), [rank, 2 * rank]]
        variables = [
            v1.get_variable(name, initializer=value, use_resource=use_resource)
            for name, value in zip("ab", values, strict=True)
        ]
        broadcast = keras_hvd.broadcast_global_variables(root)
        session.run(v1.global_variables_initializer())
        session.run(broadcast)
        a, b = session.run(variables)
    assert a == root
    np.testing.assert_array_equal(b, [root, 2 * root])


def test_a_root_that_does_not_exist(size):
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("a", initializer=1.0)
        broadcast = keras_hvd.broadcast_global_variables(size)
        session.run(v1.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"root_rank {size}"):
            session.run(broadcast)
        with pytest.raises(TypeError, match="root_rank must be a whole number"):
            keras_hvd.broadcast_global_variables("0")
    assert keras_hvd.allreduce(1, op=keras_hvd.Sum) == size


def test_hook(rank, size):
    """The broadcast comes first in the session, after its initializers."""
    hook = keras_hvd.BroadcastGlobalVariablesHook(size - 1, device="/cpu:0")
    for _ in range(2):  # it may serve several graphs
        with tf.Graph().as_default():
            v1.train.get_or_create_global_step()
            variable = v1.get_variable("a", initializer=float(rank))
            with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
                assert session.run(variable) == size - 1
