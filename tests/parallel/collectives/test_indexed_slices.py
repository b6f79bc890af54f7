"""allreduce and grouped_allreduce of tf.IndexedSlices, which travel as slices."""

import numpy as np
import pytest
import tensorflow as tf
from element_types import FLOAT8

import keras_hvd
from keras_hvd import Max, Min, Product, Sum


def slices_of(rank, dtype=tf.float32):
    return tf.IndexedSlices(
        tf.cast([[1.0, 1.0], [3.0, 2.0], [4.0, 4.0]], dtype),
        tf.constant([1, rank % 3, 1]),
        tf.constant([4, 2]),
    )


@pytest.mark.parametrize("way", ["eager", "graph"])
@pytest.mark.parametrize(
    "dtype", [tf.float32, tf.int32, tf.uint64, tf.int16, *FLOAT8], ids=lambda d: d.name
)
def test_indexed_slices_are_gathered(run, dtype, rank, size):
    @run
    def reduce():
        summed = keras_hvd.allreduce(slices_of(rank, dtype), op=Sum)
        average = keras_hvd.allreduce(slices_of(rank, dtype), name="slices")
        scaled = keras_hvd.allreduce(
            slices_of(rank, dtype), op=Sum, prescale_factor=0.5, postscale_factor=3.0
        )
        return summed, average, scaled

    summed, average, scaled = reduce()
    values = np.tile([[1, 1], [3, 2], [4, 4]], [size, 1])
    indices = np.concatenate([[1, peer % 3, 1] for peer in range(size)])
    # An average of integers is one of floats, as TensorFlow divides them.
    of_average = tf.truediv(tf.cast(1, dtype), 1).dtype if dtype.is_integer else dtype
    for result, expected, result_dtype in (
        (summed, values, dtype),
        (average, values / size, of_average),
        (scaled, values * 1.5 if dtype.is_floating else values // 2 * 3, dtype),
    ):
        assert isinstance(result, tf.IndexedSlices)
        assert result.values.dtype == result_dtype
        np.testing.assert_array_equal(result.indices, indices)
        # Float8 is scaled in float32, and rounded once.
        wanted = expected.astype(np.float32).astype(result_dtype.as_numpy_dtype)
        np.testing.assert_allclose(
            result.values.numpy().astype(np.float64),
            wanted.astype(np.float64),
            rtol=1e-6,
        )
        np.testing.assert_array_equal(result.dense_shape, [4, 2])


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_averages_are_those_of_a_division(run, dtype, size, request):
    """To the last bit, which a product with 1 / size misses on three ranks.

    XLA itself makes such a product of a division by a constant, which is exact if that
    is a power of two.
    """
    is_power_of_two = size & (size - 1) == 0
    wrong_bits = 1 if "xla" in request.node.name and not is_power_of_two else 0
    values = np.random.default_rng(1).normal(size=(100, 3)).astype(dtype.name)
    slices = tf.IndexedSlices(tf.constant(values), tf.range(100))
    reduced = run(lambda: keras_hvd.allreduce(slices))()
    wanted = np.concatenate([values / values.dtype.type(size)] * size)
    np.testing.assert_array_max_ulp(reduced.values.numpy(), wanted, wrong_bits)


@pytest.mark.needs_xla
def test_indexed_slices_compiled_by_xla(rank, size):
    @tf.function(jit_compile=True)
    def reduce(values, indices):
        slices = tf.IndexedSlices(values, indices, tf.constant([4, 2]))
        return tf.convert_to_tensor(keras_hvd.allreduce(slices, op=Sum))

    given = slices_of(rank)
    expected = sum(tf.convert_to_tensor(slices_of(peer)) for peer in range(size))
    np.testing.assert_array_equal(reduce(given.values, given.indices), expected)


def test_slices_among_a_group(run, rank, size):
    @run
    def reduce():
        return keras_hvd.grouped_allreduce(
            [slices_of(rank), tf.ones([2]), slices_of(rank), tf.ones([], tf.int32)],
            op=Sum,
            name="mixed group",
        )

    first, dense, second, number = reduce()
    np.testing.assert_array_equal(dense, [size, size])
    assert number == size
    expected = np.tile([[1, 1], [3, 2], [4, 4]], [size, 1])
    for slices in (first, second):
        np.testing.assert_array_equal(slices.values, expected)


def test_the_gradient_of_slices(rank, size):
    values = tf.Variable(tf.ones([2, 2]))
    with tf.GradientTape() as tape:
        slices = tf.IndexedSlices(values, tf.constant([0, 1]), tf.constant([2, 2]))
        reduced = keras_hvd.allreduce(slices)
        loss = tf.reduce_sum(reduced.values) * (rank + 1.0)
    gradient = tape.gradient(loss, values)
    # The average that allgather gives, divided as the values were.
    expected = sum(range(1, size + 1)) / size / size
    np.testing.assert_allclose(gradient, np.full([2, 2], expected), rtol=1e-6)


@pytest.mark.parametrize("op", [Min, Max, Product], ids=str)
def test_slices_have_no_other_reduction(op, rank, size):
    with pytest.raises(NotImplementedError, match="IndexedSlices takes op=Average or"):
        keras_hvd.allreduce(slices_of(rank), op=op)
    with pytest.raises(NotImplementedError, match="IndexedSlices takes op=Average or"):
        keras_hvd.grouped_allreduce([slices_of(rank)], op=op)
    assert keras_hvd.allreduce(1, op=Sum) == size


@pytest.mark.parametrize("dtype", [tf.bool, tf.complex64, tf.qint8], ids=str)
def test_slices_of_what_is_only_moved(dtype, rank, size):
    def values_of(peer):
        return tf.cast([[peer % 2], [1], [0]], dtype)

    slices = tf.IndexedSlices(values_of(rank), tf.constant([0, 1, 0]))
    summed = keras_hvd.allreduce(slices, op=Sum)
    assert summed.values.dtype == dtype
    expected = tf.concat(
        [tf.cast(values_of(peer), tf.int32) for peer in range(size)], 0
    )
    np.testing.assert_array_equal(tf.cast(summed.values, tf.int32), expected)
    if dtype.is_complex:
        average = keras_hvd.allreduce(slices, postscale_factor=3.0)
        np.testing.assert_allclose(average.values, summed.values.numpy() / size * 3)
        return
    for arguments in ({}, {"op": Sum, "prescale_factor": 2.0}):
        with pytest.raises(TypeError, match=f"{dtype.name} takes op=Sum, without"):
            keras_hvd.allreduce(slices, **arguments)
