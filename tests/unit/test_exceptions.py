"""The exceptions for the engine's result codes, in Python and from TensorFlow's ops."""

import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd import exceptions
from keras_hvd.job import basics


@pytest.mark.parametrize(
    "code, kind",
    [
        (1, keras_hvd.MismatchError),
        (2, keras_hvd.NotInitializedError),
        (3, keras_hvd.RankFailedError),
        (4, keras_hvd.ShutDownError),
        (5, keras_hvd.ForkedError),
        (6, keras_hvd.KerasHvdError),
    ],
)
def test_each_code_has_its_exception(code, kind):
    error = exceptions.from_code(code, "what happened")
    assert type(error) is kind
    assert isinstance(error, keras_hvd.KerasHvdError)
    assert isinstance(error, RuntimeError)
    assert str(error) == "what happened"


def test_a_mismatch_is_a_value_error_too():
    assert issubclass(keras_hvd.MismatchError, ValueError)


def test_success_raises_nothing():
    basics.check(0)


def test_a_graph_that_outlives_the_job():
    keras_hvd.init()

    @tf.function
    def step(x):
        return keras_hvd.allreduce(x)

    step(tf.ones([2]))
    keras_hvd.shutdown()
    with pytest.raises(tf.errors.FailedPreconditionError, match="keras_hvd.init()"):
        step(tf.ones([2]))
    keras_hvd.init()
    assert step(tf.ones([2])).shape == [2]


def test_a_wrong_request_names_the_tensor():
    keras_hvd.init()
    with pytest.raises(tf.errors.InvalidArgumentError, match="'weights': root_rank 5"):
        keras_hvd.broadcast(1.0, 5, name="weights")
