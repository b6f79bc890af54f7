"""Types that no reduction has, in every collective that only moves elements."""

import numpy as np
import pytest
import tensorflow as tf
from element_types import MOVED

import keras_hvd
from keras_hvd import Sum

# TensorFlow has few ops for these, and XLA none.
STORED_AS_INTEGERS = [
    tf.qint8,
    tf.quint8,
    tf.qint16,
    tf.quint16,
    tf.qint32,
    tf.as_dtype("int4"),
    tf.as_dtype("uint4"),
]

CASES = [(dtype, way) for dtype in MOVED for way in ("eager", "graph", "xla")]
CASES += [(dtype, way) for dtype in STORED_AS_INTEGERS for way in ("eager", "graph")]


def given_by(rank, size, dtype):
    """Two rows for each rank, of which no two are the same."""
    numbers = np.arange(4 * size).reshape(2 * size, 2) % 3 + 2 * rank
    if dtype.is_complex:
        numbers = numbers - 0.5j * numbers
    return tf.cast(numbers, dtype)


def bytes_of(tensors):
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


@pytest.mark.parametrize(
    "dtype, way",
    [
        pytest.param(*case, marks=pytest.mark.needs_xla if case[1] == "xla" else [])
        for case in CASES
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_moved_to_the_bit(dtype, run, rank, size):
    given = [given_by(peer, size, dtype) for peer in range(size)]

    @run
    def move(x):
        slices = keras_hvd.allreduce(
            tf.IndexedSlices(x, tf.range(2 * size, dtype=tf.int64)), op=Sum
        )
        return (
            keras_hvd.allgather(x),
            *keras_hvd.grouped_allgather([x, tf.constant([rank])]),
            keras_hvd.alltoall(x),
            keras_hvd.broadcast(x, size - 1),
            slices.values,
            slices.indices,
        )

    gathered, in_group, ranks, exchanged, broadcast, values, indices = move(given[rank])
    for each in (gathered, in_group, values):
        assert each.dtype == dtype
        assert each.shape == [2 * size * size, 2]
        assert bytes_of([each]) == bytes_of(given)
    np.testing.assert_array_equal(ranks, range(size))
    np.testing.assert_array_equal(indices, np.tile(np.arange(2 * size), size))
    assert exchanged.dtype == broadcast.dtype == dtype
    received = [tensor.numpy()[2 * rank : 2 * rank + 2] for tensor in given]
    assert exchanged.numpy().tobytes() == b"".join(map(np.ndarray.tobytes, received))
    assert bytes_of([broadcast]) == bytes_of(given[-1:])


@pytest.mark.parametrize("dtype", [*MOVED, *STORED_AS_INTEGERS], ids=lambda d: d.name)
def test_reductions_name_what_they_take(dtype, size):
    x = given_by(0, size, dtype)
    for reduce in (keras_hvd.allreduce, keras_hvd.reducescatter):
        with pytest.raises(TypeError, match=f"takes .*float8_e4m3fn; got {dtype.name}"):
            reduce(x, op=Sum)


def test_gradients_of_complex_numbers(run, rank, size):
    """For each collective on its own; the loss is the sum of its results' squares."""
    moves = [
        keras_hvd.allgather,
        keras_hvd.alltoall,
        lambda x: keras_hvd.broadcast(x, 0),
    ]

    @run
    def gradients(x):
        results = []
        for move in moves:
            with tf.GradientTape() as tape:
                tape.watch(x)
                moved = move(x)
                squares = tf.math.real(moved * tf.math.conj(moved))
                loss = tf.reduce_sum(squares) * (rank + 1.0)
            results.append(tape.gradient(loss, x))
        return results

    x = given_by(rank, size, tf.complex64).numpy()
    gathered, exchanged, broadcast = gradients(tf.constant(x))
    weights = np.arange(1, size + 1)
    mean = weights.mean()
    np.testing.assert_allclose(gathered, 2 * x * mean, rtol=1e-6)
    of_rows = np.repeat(weights, 2)[:, None]
    np.testing.assert_allclose(exchanged, 2 * x * of_rows, rtol=1e-6)
    expected = 2 * x * mean if rank == 0 else np.zeros_like(x)
    np.testing.assert_allclose(broadcast, expected, rtol=1e-6)
