"""Adasum, against the recursion of its definition in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd import Adasum

TOLERANCES = {
    tf.float16: 1e-3,
    tf.bfloat16: 8e-3,
    tf.float32: 1e-6,
    tf.float64: 1e-14,
    tf.as_dtype("float8_e5m2"): 1.3e-1,
    tf.as_dtype("float8_e4m3fn"): 6.5e-2,
}


@pytest.fixture
def power_of_two(size):
    """Skips a test on other numbers of ranks, which Adasum refuses."""
    if size & (size - 1):
        pytest.skip("needs 1, 2, 4, 8... ranks")


def of_two(a, b):
    dot = np.vdot(a, b)
    of_a = 1 - dot / (2 * np.vdot(a, a)) if a.any() else 1
    of_b = 1 - dot / (2 * np.vdot(b, b)) if b.any() else 1
    return of_a * a + of_b * b


def adasum(vectors):
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    return of_two(adasum(vectors[:half]), adasum(vectors[half:]))


def assert_close(result, inputs, scale=1.0):
    expected = adasum([each.astype(np.float64) for each in inputs]) * scale
    tolerance = TOLERANCES[result.dtype]
    got = result.numpy().astype(np.float64)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("power_of_two")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda d: d.name)
def test_equals_numpy(dtype, values, rank, size, equal_on_all_ranks):
    for shape in [(), (0,), (1,), (7, 5), (1023,), (65_537,), (2, 500_003)]:
        inputs = [values(dtype, shape, peer) for peer in range(size)]
        result = keras_hvd.allreduce(inputs[rank], op=Adasum)
        assert_close(result, inputs)
        assert equal_on_all_ranks([result.numpy()])


@pytest.mark.usefixtures("power_of_two")
def test_each_tensor_of_a_group_for_itself(run, values, rank, size):
    shapes = {tf.float32: (50, 3), tf.float64: (7,), tf.float16: (4, 4)}
    inputs = [[values(d, shapes[d], peer) for d in shapes] for peer in range(size)]

    @run
    def group(*tensors):
        return keras_hvd.grouped_allreduce(
            tensors, op=Adasum, prescale_factor=2.0, postscale_factor=0.25
        )

    results = group(*(tf.constant(tensor) for tensor in inputs[rank]))
    alone = [
        keras_hvd.allreduce(
            tensor, op=Adasum, prescale_factor=2.0, postscale_factor=0.25
        )
        for tensor in inputs[rank]
    ]
    for place, result in enumerate(results):
        assert_close(result, [of_rank[place] for of_rank in inputs], 0.5)
        assert result.numpy().tobytes() == alone[place].numpy().tobytes()


@pytest.mark.usefixtures("power_of_two")
def test_equal_gradients_are_averaged_and_orthogonal_ones_summed(rank, size):
    np.testing.assert_array_equal(
        keras_hvd.allreduce([1.0, -2.0, 3.0], op=Adasum), [1.0, -2.0, 3.0]
    )
    np.testing.assert_array_equal(
        keras_hvd.allreduce(tf.one_hot(rank, size) * (rank + 2.0), op=Adasum),
        np.arange(2.0, size + 2),
    )
    np.testing.assert_array_equal(keras_hvd.allreduce([0.0], op=Adasum), [0.0])


def test_other_numbers_of_ranks_are_refused(size):
    if size & (size - 1) == 0:
        pytest.skip("is a power of 2")
    for reduce in (
        lambda: keras_hvd.allreduce([1.0], op=Adasum),
        lambda: keras_hvd.grouped_allreduce([[1.0]], op=Adasum),
    ):
        with pytest.raises(NotImplementedError, match=f"power of 2, not {size}"):
            reduce()


@pytest.mark.usefixtures("power_of_two")
def test_integers_are_refused():
    with pytest.raises(TypeError, match="floating types; got int32"):
        keras_hvd.allreduce([1], op=Adasum)
    with pytest.raises(TypeError, match="floating types; got bool"):
        keras_hvd.grouped_allreduce([[1.0], [True]], op=Adasum)


@pytest.mark.usefixtures("power_of_two")
def test_it_has_no_gradient():
    with tf.GradientTape() as tape:
        x = tf.Variable([1.0])
        y = keras_hvd.allreduce(x, op=Adasum)
    with pytest.raises(LookupError, match="Adasum has no gradient"):
        tape.gradient(y, x)
