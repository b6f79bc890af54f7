"""broadcast, from every root."""

import numpy as np
import pytest
import tensorflow as tf
from element_types import MOVED, REDUCED

import keras_hvd

SHAPES = [(), (0,), (1,), (3,), (7, 5), (2, 0, 3), (1023,), (65_537,), (1_500_007,)]

each_dtype = pytest.mark.parametrize("dtype", REDUCED + MOVED, ids=lambda d: d.name)
eager_and_graph = pytest.mark.parametrize(
    "run", [lambda f: f, tf.function], ids=["eager", "graph"]
)


def assert_same(result, expected):
    """Not a bit may differ."""
    assert result.dtype.as_numpy_dtype == expected.dtype
    assert result.shape == expected.shape
    assert result.numpy().tobytes() == expected.tobytes()


@each_dtype
def test_every_root(dtype, values, rank, size):
    for root in range(size):
        for shape in SHAPES:
            given = values(dtype, shape, rank)
            result = keras_hvd.broadcast(given, root)
            assert_same(result, values(dtype, shape, root))


def test_the_input_keeps_its_value(rank, size):
    given = tf.fill([1001], rank)
    keras_hvd.broadcast(given, size - 1)
    np.testing.assert_array_equal(given, np.full(1001, rank))


def test_in_a_function_of_unknown_shapes(values, rank, size):
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def last(x):
        return keras_hvd.broadcast(x, size - 1)

    for shape in SHAPES:
        result = last(values(tf.float32, shape, rank))
        assert_same(result, values(tf.float32, shape, size - 1))


@eager_and_graph
def test_gradient_is_the_average_on_the_root_and_zero_elsewhere(run, rank, size):
    @run
    def gradient(x, weights, root):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(keras_hvd.broadcast(x, root) * weights)
        return tape.gradient(loss, x)

    # Infinity times zero would not be zero.
    weights = [np.array([1.0, peer, np.inf], np.float32) for peer in range(size)]
    for root in range(size):
        result = gradient(tf.ones([3]), tf.constant(weights[rank]), root)
        expected = sum(weights) / size if rank == root else np.zeros(3)
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("root", [-1, 1000])
def test_a_root_that_does_not_exist(root, rank, size):
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{root}"):
        keras_hvd.broadcast(1.0, root, name="no such root")
    assert keras_hvd.broadcast(rank, size - 1) == size - 1


def test_a_root_that_is_no_number():
    with pytest.raises(TypeError):
        keras_hvd.broadcast(1.0, 0.5)


def test_text_is_refused():
    with pytest.raises(TypeError, match="got string"):
        keras_hvd.broadcast("text", 0)


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize(
    "given, texts",
    [
        (lambda odd: (tf.ones([3 if odd else 2]), 0), ("[2]", "[3]")),
        (
            lambda odd: (tf.ones([2], tf.float64 if odd else tf.float32), 0),
            ("float32", "float64"),
        ),
        (lambda odd: (tf.ones([2]), 1 if odd else 0), ("root 0", "root 1")),
    ],
    ids=["shape", "dtype", "root"],
)
def test_a_mismatch_is_an_error_on_every_rank(given, texts, rank, size):
    tensor, root = given(odd=rank == 0)
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        keras_hvd.broadcast(tensor, root, name="mismatched broadcast")
    for text in ("mismatched broadcast", *texts):
        assert text in str(error.value)
    assert keras_hvd.broadcast(rank, size - 1) == size - 1
