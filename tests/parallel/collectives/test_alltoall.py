"""alltoall, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from element_types import MOVED, REDUCED

import keras_hvd

each_dtype = pytest.mark.parametrize("dtype", REDUCED + MOVED, ids=lambda d: d.name)


def assert_same(result, expected):
    """Not a bit may differ."""
    assert result.dtype.as_numpy_dtype == expected.dtype
    assert result.shape == expected.shape
    assert result.numpy().tobytes() == expected.tobytes()


def parts_for(rank, inputs, splits):
    """The rows for one rank in all ranks' `inputs`."""
    starts = [np.cumsum([0, *of_peer]) for of_peer in splits]
    parts = [
        tensor[start[rank] : start[rank + 1]]
        for tensor, start in zip(inputs, starts, strict=True)
    ]
    return np.concatenate(parts)


@each_dtype
def test_even_splits(dtype, values, rank, size):
    for shape in [(0,), (size,), (3 * size, 2), (size, 0, 3), (5000 * size, 7)]:
        inputs = [values(dtype, shape, peer) for peer in range(size)]
        expected = parts_for(rank, inputs, [[shape[0] // size] * size] * size)
        assert_same(keras_hvd.alltoall(inputs[rank]), expected)


@each_dtype
def test_uneven_splits(dtype, values, rank, size):
    for rows in [
        lambda giver, getter: giver + getter,
        lambda giver, getter: giver * (getter + 1),
        lambda giver, getter: 3 if giver == getter else 0,
        lambda giver, getter: 20_011 if (giver, getter) == (0, size - 1) else 0,
    ]:
        splits = [
            [rows(giver, getter) for getter in range(size)] for giver in range(size)
        ]
        inputs = [values(dtype, (sum(splits[peer]), 3), peer) for peer in range(size)]
        result, received = keras_hvd.alltoall(inputs[rank], splits[rank])
        assert_same(result, parts_for(rank, inputs, splits))
        expected = np.array([splits[peer][rank] for peer in range(size)], np.int32)
        assert_same(received, expected)


def test_received_splits_have_the_type_of_the_splits(run, size):
    @run
    def exchange(x, splits):
        return keras_hvd.alltoall(x, splits)

    for dtype in (tf.int32, tf.int64):
        rows, received = exchange(tf.range(size), tf.ones([size], dtype))
        assert rows.shape == [size]
        assert_same(received, np.ones([size], dtype.as_numpy_dtype))


def test_ranks_that_give_different_numbers_of_rows_evenly(rank, size):
    result = keras_hvd.alltoall(tf.fill([size * rank], rank))
    np.testing.assert_array_equal(result, np.repeat(np.arange(size), np.arange(size)))


def test_as_much_received_as_given(run, rank, size):
    """As a compiled program can do it: every rank shifts its rows around."""
    splits = [[0] * size for _ in range(size)]
    for peer in range(size):
        splits[peer][(peer + 1) % size] = 2
        splits[peer][peer] += 1

    @run
    def exchange(x, splits):
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows, received = keras_hvd.alltoall(x, splits)
            loss = tf.reduce_sum(rows * (tf.range(3.0)[:, None] + 10.0 * rank))
        return rows, received, tape.gradient(loss, x)

    x = tf.constant([[100.0 * rank + row] for row in range(3)])
    rows, received, gradient = exchange(x, tf.constant(splits[rank]))
    inputs = [
        np.float32([[100 * peer + row] for row in range(3)]) for peer in range(size)
    ]
    np.testing.assert_array_equal(rows, parts_for(rank, inputs, splits))
    backwards = [
        [splits[peer][getter] for peer in range(size)] for getter in range(size)
    ]
    np.testing.assert_array_equal(received, backwards[rank])
    # Each rank's weights for the rows that came from here, back in place.
    weights = [np.arange(3.0)[:, None] + 10 * peer for peer in range(size)]
    np.testing.assert_array_equal(gradient, parts_for(rank, weights, backwards))


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_gradient_of_uneven_splits(run, rank, size):
    @run
    def gradient(x, splits, weight):
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows, _ = keras_hvd.alltoall(x, splits)
            loss = tf.reduce_sum(rows**2) * weight
        return tape.gradient(loss, x)

    splits = [rank + getter for getter in range(size)]
    x = np.linspace(1, 2, 2 * sum(splits), dtype=np.float64).reshape(-1, 2)
    weights = np.repeat(np.arange(1.0, size + 1), splits)[:, None]
    result = gradient(tf.constant(x), splits, tf.constant(rank + 1.0, tf.float64))
    np.testing.assert_allclose(result, 2 * x * weights)


def test_gradient_of_even_splits(run, rank, size):
    @run
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(keras_hvd.alltoall(x)) * (rank + 1)
        return tape.gradient(loss, x)

    np.testing.assert_array_equal(
        gradient(tf.ones([2 * size])), np.repeat(np.arange(1.0, size + 1), 2)
    )


def test_in_a_function_of_unknown_shapes(values, rank, size):
    @tf.function(
        input_signature=[tf.TensorSpec(None, tf.float32), tf.TensorSpec(None, tf.int32)]
    )
    def exchange(x, splits):
        return keras_hvd.alltoall(x, splits)

    for rows in range(4):
        inputs = [values(tf.float32, (rows * size, 2), peer) for peer in range(size)]
        result, _ = exchange(inputs[rank], [rows] * size)
        assert_same(result, parts_for(rank, inputs, [[rows] * size] * size))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"tf.expand_dims"):
        exchange(1.0, [1] * size)


@pytest.mark.parametrize(
    "splits, text",
    [
        (lambda size: [4] * (size - 1) + [5], r"do not add up to the tensor's \d+"),
        (lambda size: [4] * (size - 1) + [3], r"do not add up to the tensor's \d+"),
        (lambda size: [-1] + [5] * (size - 1), "a split is negative: -1"),
        (lambda size: [4] * (size + 1), "one number for each rank"),
        (lambda size: [], "one number for each rank"),
        # The lower 32 bits are right.
        (lambda size: [2**32 + 4] + [4] * (size - 1), "do not add up"),
        (lambda size: np.int64([2**32 + 4] + [4] * (size - 1)), "do not add up"),
        (lambda size: np.int64([4] * (size - 1) + [4 - 2**32]), "is negative: -42949"),
    ],
    ids=[
        *("too many", "too few", "negative", "too long", "empty"),
        *("list cut short", "array cut short", "negative cut short"),
    ],
)
def test_wrong_splits_on_one_rank(run, splits, text, rank, size):
    """An error there, of which the others notice nothing but a delay."""
    wrong = splits(size)

    def exchange(x, splits):
        # Within the function: of an argument TensorFlow would make a tensor.
        @run
        def of_rows(x):
            return keras_hvd.alltoall(x, splits, name="wrong splits")

        return of_rows(x)

    x = tf.ones([4 * size])
    if rank == size - 1:
        error = (tf.errors.InvalidArgumentError, tf.errors.InternalError)
        with pytest.raises(error, match=text):
            exchange(x, wrong if len(wrong) else tf.constant(wrong, tf.int32))
    assert exchange(x, tf.fill([size], 4))[0].shape == [4 * size]


@pytest.mark.usefixtures("several_ranks")
def test_rows_that_cannot_be_split_evenly(size):
    text = rf"multiple of the number of ranks, {size}"
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        keras_hvd.alltoall(tf.ones([size + 1]))
    assert keras_hvd.alltoall(tf.ones([size])).shape == [size]


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match=r"tf.expand_dims"):
        keras_hvd.alltoall(1.0)
    with pytest.raises(TypeError, match="got string"):
        keras_hvd.alltoall(["text"])
    with pytest.raises(TypeError, match="int32 or int64; got float32"):
        keras_hvd.alltoall([1.0], [1.0])
    with pytest.raises(ValueError, match="a number for each rank"):
        keras_hvd.alltoall([1.0], 1)


@pytest.mark.needs_xla
@pytest.mark.usefixtures("several_ranks")
def test_a_compiled_program_gets_as_many_rows_as_it_gives(rank, size):
    @tf.function(jit_compile=True)
    def exchange(x, splits):
        return keras_hvd.alltoall(x, splits)

    # All to rank 0.
    with pytest.raises(tf.errors.InvalidArgumentError, match="has fixed shapes"):
        exchange(tf.ones([4]), tf.constant([4] + [0] * (size - 1)))


@pytest.mark.usefixtures("several_ranks")
def test_a_mismatch_is_an_error_on_every_rank(rank, size):
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        keras_hvd.alltoall(tf.ones([size, 2 + (rank == 0)]), name="mismatched exchange")
    for text in ("mismatched exchange", "[any,2]", "[any,3]"):
        assert text in str(error.value)
    assert keras_hvd.alltoall(tf.ones([size])).shape == [size]
