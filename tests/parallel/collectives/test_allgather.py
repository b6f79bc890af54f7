"""allgather, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from element_types import MOVED, REDUCED

import keras_hvd

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
def test_gradient_is_this_ranks_rows_of_the_average(run, rank, size):
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
    np.testing.assert_allclose(
        result, sum(weights)[start : start + rows[rank]] / size, rtol=1e-6
    )


def test_a_group_of_mixed_types_and_shapes(run, values, rank, size):
    shapes = {tf.float32: (3, 2), tf.int64: (1,), tf.bool: (5, 0), tf.float16: (2, 4)}
    inputs = [[values(d, shapes[d], peer) for d in shapes] for peer in range(size)]

    @run
    def gather(*tensors):
        return keras_hvd.grouped_allgather(tensors)

    gathered = gather(*(tf.constant(tensor) for tensor in inputs[rank]))
    for place, result in enumerate(gathered):
        assert_same(result, np.concatenate([of_rank[place] for of_rank in inputs]))
    assert keras_hvd.grouped_allgather([]) == []


@eager_and_graph
def test_a_group_of_uneven_rows(run, values, rank, size):
    inputs = [
        [values(tf.int32, ((peer * place) % 7 * 500, 3), peer) for place in range(20)]
        for peer in range(size)
    ]
    for place, result in enumerate(run(keras_hvd.grouped_allgather)(inputs[rank])):
        assert_same(result, np.concatenate([of_rank[place] for of_rank in inputs]))


def test_gradient_of_a_group(run, rank, size):
    """Only floating results have one, used or not."""
    weights = np.arange(2.0 * size, dtype=np.float32) + 1

    @run
    def gradients(x, y, z):
        with tf.GradientTape() as tape:
            tape.watch([x, z])
            first, _, _ = keras_hvd.grouped_allgather([x, y, z])
            loss = tf.reduce_sum(first * weights) * (rank + 1)
        return tape.gradient(loss, [x, z])

    of_x, of_z = gradients(tf.ones([2]), tf.constant([1]), tf.ones([3, 2]))
    of_losses = sum(range(1, size + 1)) / size
    expected = weights[2 * rank : 2 * rank + 2] * of_losses
    np.testing.assert_allclose(of_x, expected, rtol=1e-6)
    np.testing.assert_array_equal(of_z, np.zeros([3, 2]))


@pytest.mark.usefixtures("several_ranks")
def test_groups_that_differ_are_an_error_on_every_rank(rank, size):
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="2 tensors .*3 tensors"
    ):
        keras_hvd.grouped_allgather([[1.0]] * (3 if rank == size - 1 else 2))
    assert keras_hvd.allgather([rank]).shape == [size]


def test_a_scalar_is_refused():
    with pytest.raises(ValueError, match=r"tf.expand_dims"):
        keras_hvd.grouped_allgather([[1.0], 1.0])
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
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        keras_hvd.allgather(given(odd=rank == 0), name="mismatched gather")
    for text in ("mismatched gather", *texts):
        assert text in str(error.value)
    assert keras_hvd.allgather([rank]).shape == [size]
