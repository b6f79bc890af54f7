"""reducescatter and grouped_reducescatter, against allreduce."""

import numpy as np
import pytest
import tensorflow as tf
from element_types import NUMBERS

import keras_hvd
from keras_hvd import Average, Sum

SHAPES = [(0,), (1,), (3,), (7, 5), (4, 0, 3), (1023,), (65_537, 3)]

each_dtype = pytest.mark.parametrize("dtype", NUMBERS, ids=lambda d: d.name)
each_op = pytest.mark.parametrize("op", [Average, Sum], ids=lambda op: op.name)


def rows_of(rank, rows, size):
    """The first ranks have one more where it does not divide."""
    start = rank * (rows // size) + min(rank, rows % size)
    return slice(start, start + rows // size + (rank < rows % size))


def assert_same(result, expected):
    """Not a bit may differ."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert result.numpy().tobytes() == expected.numpy().tobytes()


@each_op
@each_dtype
def test_same_bits_as_this_ranks_rows_of_an_allreduce(dtype, op, values, rank, size):
    for shape in SHAPES:
        given = values(dtype, shape, rank)
        expected = keras_hvd.allreduce(given, op=op)[rows_of(rank, shape[0], size)]
        assert_same(keras_hvd.reducescatter(given, op=op), expected)


def test_averages_by_default(rank, size):
    given = np.full([size, 2], rank, np.float32)
    mean = np.arange(size, dtype=np.float32).mean()
    np.testing.assert_array_equal(keras_hvd.reducescatter(given), [[mean, mean]])


def test_scales_and_groups(run, values, rank, size):
    shapes = {tf.float32: (2 * size + 1, 3), tf.int32: (size,), tf.bfloat16: (1, 2)}
    given = [tf.constant(values(dtype, shapes[dtype], rank)) for dtype in shapes]

    @run
    def both(*tensors):
        scales = {"prescale_factor": 0.5, "postscale_factor": 4.0}
        scattered = keras_hvd.grouped_reducescatter(tensors, op=Sum, **scales)
        reduced = keras_hvd.grouped_allreduce(tensors, op=Sum, **scales)
        return scattered, reduced

    for got, reduced in zip(*both(*given), strict=True):
        assert_same(got, reduced[rows_of(rank, reduced.shape[0], size)])
    assert keras_hvd.grouped_reducescatter([]) == []


def test_compression(values, rank, size):
    given = values(tf.float32, (2 * size, 3), rank)
    for compression in (keras_hvd.Compression.fp16, keras_hvd.Compression.bf16):
        reduced = keras_hvd.allreduce(given, compression=compression)
        expected = reduced[rows_of(rank, 2 * size, size)]
        assert_same(keras_hvd.reducescatter(given, compression=compression), expected)
        [result, numbers] = keras_hvd.grouped_reducescatter(
            [given, [1] * size], compression=compression
        )
        assert_same(result, expected)
        assert_same(numbers, tf.constant([1]))


def test_in_a_function_of_unknown_shapes(values, rank, size):
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def scatter(x):
        return keras_hvd.reducescatter(x, op=Sum)

    for shape in SHAPES:
        given = values(tf.float32, shape, rank)
        expected = keras_hvd.allreduce(given, op=Sum)[rows_of(rank, shape[0], size)]
        assert_same(scatter(given), expected)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"tf.expand_dims"):
        scatter(1.0)


@each_op
@pytest.mark.parametrize("more", [0, 1])
def test_gradient_is_all_ranks_gradients_one_behind_the_other(
    run, op, more, rank, size
):
    """With the scales; times the number of ranks with Sum."""
    rows = 2 * size + more
    weights = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2) + 1

    @run
    def gradients(x, own):
        with tf.GradientTape() as tape:
            tape.watch(x)
            first, second = keras_hvd.grouped_reducescatter(
                [x, x * 3], op=op, prescale_factor=0.5, postscale_factor=8.0
            )
            loss = tf.reduce_sum(first * own) + tf.reduce_sum(second)
        return tape.gradient(loss, x)

    own = tf.constant(weights[rows_of(rank, rows, size)])
    expected = (weights + 3) * 4 * (size if op == Sum else 1)
    result = gradients(tf.ones([rows, 2]), own)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_a_group_of_which_one_result_is_used(run, size):
    @run
    def gradients(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            first, _ = keras_hvd.grouped_reducescatter([x, y], op=Sum)
            loss = tf.reduce_sum(first)
        return tape.gradient(loss, [x, y])

    of_x, of_y = gradients(tf.ones([size]), tf.ones([2 * size, 2]))
    np.testing.assert_array_equal(of_x, np.full(size, size))
    np.testing.assert_array_equal(of_y, np.zeros([2 * size, 2]))


@pytest.mark.parametrize("op", [keras_hvd.Min, keras_hvd.Product, keras_hvd.Adasum, 17])
def test_other_reductions_are_refused(op):
    for scatter in (
        keras_hvd.reducescatter,
        lambda x, op: keras_hvd.grouped_reducescatter([x], op=op),
    ):
        with pytest.raises(ValueError, match=r"keras_hvd.Sum or keras_hvd.Average"):
            scatter([1.0], op=op)


def test_scalars_and_text_are_refused():
    with pytest.raises(ValueError, match=r"tf.expand_dims"):
        keras_hvd.reducescatter(1.0)
    with pytest.raises(ValueError, match=r"tf.expand_dims"):
        keras_hvd.grouped_reducescatter([[1.0], 2.0])
    with pytest.raises(TypeError, match="got string"):
        keras_hvd.reducescatter(["text"])


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize(
    "given, texts",
    [
        (lambda odd: ([4 if odd else 3], Sum), ("[3]", "[4]")),
        (lambda odd: ([3], Sum if odd else Average), ("Sum", "Average")),
    ],
    ids=["shape", "op"],
)
def test_a_mismatch_is_an_error_on_every_rank(given, texts, rank, size):
    shape, op = given(odd=rank == 0)
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        keras_hvd.reducescatter(tf.ones(shape), op=op, name="mismatched scatter")
    for text in ("mismatched scatter", *texts):
        assert text in str(error.value)
    assert keras_hvd.allreduce(1, op=Sum) == size
