"""allgather, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import keras_hvd

DTYPES = [
    tf.uint8,
    tf.int8,
    tf.int32,
    tf.int64,
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.bool,
]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
eager_and_graph = pytest.mark.parametrize(
    "run", [lambda f: f, tf.function], ids=["eager", "graph"]
)


def assert_same(result, expected):
    """Not a bit may differ."""
    assert result.dtype.as_numpy_dtype == expected.dtype
    assert result.shape == expected.shape
    assert result.numpy().tobytes() == expected.tobytes()


@each_dtype
def test_equals_numpy(dtype, values, rank, size):
    for shape in [(1,), (3,), (2, 3), (5, 1, 3), (0,), (4, 0), (1023,), (65_537, 3)]:
        inputs = [values(dtype, shape, peer) for peer in range(size)]
        assert_same(keras_hvd.allgather(inputs[rank]), np.concatenate(inputs))


@each_dtype
def test_first_dimensions_may_differ(dtype, values, rank, size):
    for rows in [
        lambda peer: peer + 1,
        lambda peer: size - peer,
        lambda peer: 0 if peer == 0 else 3,
        lambda peer: 5 if peer == size - 1 else 0,
        lambda peer: 100_003 * peer,
    ]:
        inputs = [values(dtype, (rows(peer), 3), peer) for peer in range(size)]
        assert_same(keras_hvd.allgather(inputs[rank]), np.concatenate(inputs))


def test_no_rows_at_all():
    assert_same(keras_hvd.allgather(np.ones([0, 3])), np.ones([0, 3]))


def test_in_a_function_of_unknown_shapes(values, rank, size):
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def gather(x):
        return keras_hvd.allgather(x)

    for rows in range(1, 10):
        inputs = [values(tf.float32, (rows * (p + 1), 2), p) for p in range(size)]
        assert_same(gather(inputs[rank]), np.concatenate(inputs))


def test_the_shape_that_is_known_in_a_graph():
    @tf.function(input_signature=[tf.TensorSpec([4, 3], tf.float32)])
    def gather(x):
        y = keras_hvd.allgather(x)
        assert y.shape.as_list() == [None, 3]
        return y

    gather(tf.ones([4, 3]))


@eager_and_graph
def test_gradient_is_this_ranks_rows_of_the_sum(run, rank, size):
    @run
    def gradient(x, weights):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(keras_hvd.allgather(x) * weights)
        return tape.gradient(loss, x)

    rows = [2 * peer for peer in range(size)]
    weights = [
        np.arange(2.0 * sum(rows), dtype=np.float32).reshape(-1, 2) * (peer + 1)
        for peer in range(size)
    ]
    start = sum(rows[:rank])
    result = gradient(tf.zeros([rows[rank], 2]), tf.constant(weights[rank]))
    np.testing.assert_allclose(result, sum(weights)[start : start + rows[rank]])


def test_a_scalar_is_refused():
    with pytest.raises(ValueError, match=r"tf.expand_dims"):
        keras_hvd.allgather(1.0)

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def gather(x):
        return keras_hvd.allgather(x)

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"tf.expand_dims"):
        gather(1.0)


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize(
    "given, texts",
    [
        (lambda odd: tf.ones([2, 4 if odd else 3]), ("3]", "4]")),
        (
            lambda odd: tf.ones([2, 3], tf.int32 if odd else tf.int64),
            ("int32", "int64"),
        ),
        (lambda odd: tf.ones([2, 3] if odd else [2, 3, 1]), ("3]", "3,1]")),
    ],
    ids=["shape", "dtype", "dimensions"],
)
def test_a_mismatch_is_an_error_on_every_rank(given, texts, rank, size):
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        keras_hvd.allgather(given(odd=rank == 0), name="mismatched gather")
    for text in ("mismatched gather", *texts):
        assert text in str(error.value)
    assert keras_hvd.allgather([rank]).shape == [size]
