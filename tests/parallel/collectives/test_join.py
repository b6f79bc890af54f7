"""join: ranks with less data than others."""

import numpy as np
import pytest
import tensorflow as tf
from every_collective import ARGUMENTS, call

import keras_hvd
from keras_hvd import Adasum, Average, Max, Min, Product, Sum


def test_alone_or_at_once(size):
    for _ in range(3):
        last = keras_hvd.join()
        assert 0 <= last < size
        assert keras_hvd.allgather_object(last) == [last] * size


def test_result_is_a_tensor_that_serves_as_a_number(size):
    last = keras_hvd.join()
    assert (last.dtype, last.shape) == (tf.int32, [])
    assert f"{last}" == f"{last.numpy()}"
    assert [*range(size)][last] == int(last)
    assert keras_hvd.broadcast_object(size, last) == size


def test_in_a_function_it_joins_when_it_runs(rank, size):
    """After the collectives before it, and before those after it."""

    @tf.function
    def rest(x, steps):
        total = tf.zeros([])
        for _ in range(steps):
            total += keras_hvd.allreduce(x, op=Sum, name="step")
        before = keras_hvd.allreduce(x, op=Sum, name="before")
        last = keras_hvd.join()
        after = keras_hvd.allreduce(x, op=Max, name="after")
        return total, before, last, after

    traced = rest.get_concrete_function(tf.constant(1.0), tf.constant(0))
    for _ in range(2):
        # Rank r makes r steps, and those that have joined give zeros.
        total, before, last, after = traced(tf.constant(rank + 1.0), tf.constant(rank))
        assert (last.dtype, after) == (tf.int32, size)
        assert last == size - 1
        steps = [peer + 1.0 for peer in range(size)]
        # A rank's "before" comes after its own steps, even if others still make steps.
        assert total == sum(sum(steps[number + 1 :]) for number in range(rank))
        assert before == sum(steps)


wraps = [lambda function: function, tf.function]


@pytest.mark.parametrize("wrap_join", wraps, ids=["join", "join in a function"])
@pytest.mark.parametrize("wrap", wraps, ids=["loop", "loop in a function"])
def test_in_a_function_it_keeps_its_place_among_loops_with_variables(
    wrap, wrap_join, rank, size
):
    """TensorFlow orders these by their variables alone, of which a join has none."""
    total = tf.Variable(0.0)
    data = tf.data.Dataset.range(rank)
    join = wrap_join(keras_hvd.join)

    @tf.function
    def step():
        total.assign_add(keras_hvd.allreduce(1.0, op=Sum, name="step"))

    @wrap
    def steps():
        for _ in data:
            step()

    @tf.function
    def epochs():
        steps()
        last = join()
        step()
        join()
        return last

    for number in range(1, 3):
        assert epochs() == size - 1
        alone = [size - 1 - each for each in range(rank)]
        assert total == number * (sum(alone) + size)


def test_in_a_session(rank, size):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        step = keras_hvd.allreduce(tf.constant(1.0), op=Sum, name="step")
        last = keras_hvd.join()
        for number in range(rank):
            assert session.run(step) == size - 1 - number
        assert session.run(last) == size - 1


def test_xla_cannot_compile_it():
    with pytest.raises(NotImplementedError, match="outside of jit_compile"):
        tf.function(keras_hvd.join, jit_compile=True)()


def test_uneven_data(run, rank, size):
    @run
    def step(x):
        return (
            keras_hvd.allreduce(x, op=Sum),
            keras_hvd.allreduce(x, op=Average),
            *keras_hvd.grouped_allreduce([2 * x, tf.ones([], tf.int64)], op=Sum),
        )

    for longest in range(size):
        # Rank `longest` has most, the ranks after it ever less.
        steps = [2 + 2 * ((peer - longest - 1) % size) for peer in range(size)]
        for number in range(steps[rank]):
            total, average, doubled, count = step(tf.fill([1000], rank + 1.0))
            there = [peer for peer in range(size) if steps[peer] > number]
            expected = sum(peer + 1 for peer in there)
            np.testing.assert_array_equal(total, [expected] * 1000)
            np.testing.assert_allclose(average, [expected / size] * 1000, rtol=1e-6)
            np.testing.assert_array_equal(doubled, [2 * expected] * 1000)
            assert count == len(there)
        assert keras_hvd.join() == longest


def test_gradients_of_uneven_data(rank, size):
    x = tf.Variable(1.0)
    for number in range(rank + 1):
        with tf.GradientTape() as tape:
            loss = keras_hvd.allreduce(x, op=Sum) * 3.0
        there = size - number
        assert tape.gradient(loss, x) == 3.0 * there
    assert keras_hvd.join() == size - 1


WRONG = {
    "min": lambda: keras_hvd.allreduce(1.0, op=Min),
    "max": lambda: keras_hvd.grouped_allreduce([1.0], op=Max),
    "product": lambda: keras_hvd.allreduce(1.0, op=Product),
    "from the last": lambda: keras_hvd.broadcast(1.0, keras_hvd.size() - 1),
    # Three ranks have no Adasum.
    "adasum": lambda: keras_hvd.allreduce(
        1.0, op=Max if keras_hvd.size() == 3 else Adasum
    ),
    "slices": lambda: keras_hvd.allreduce(
        tf.IndexedSlices(tf.ones([1]), tf.constant([0]))
    ),
}
# A sum is right with zeros.
WRONG |= {
    name: lambda name=name: call(name, [1.0] * keras_hvd.size())
    for name in ARGUMENTS
    if "allreduce" not in name
}


@pytest.mark.parametrize("name", WRONG)
def test_what_zeros_would_make_wrong(name, several_ranks, rank, size):
    if rank > 0:
        with pytest.raises(
            tf.errors.FailedPreconditionError,
            match="rank 0 has joined, and gives zeros from then on",
        ):
            WRONG[name]()
        assert keras_hvd.allreduce(1, op=Sum) == size - 1
    keras_hvd.join()
    WRONG[name]()
    assert keras_hvd.allreduce(1, op=Sum) == size


def test_sets_and_objects(several_ranks, rank, size):
    pair = keras_hvd.add_process_set([0, size - 1]) if size > 2 else None
    others = keras_hvd.add_process_set(range(1, size))
    if rank > 0:
        assert keras_hvd.allreduce(1, op=Max, process_set=others) == 1
        with pytest.raises(keras_hvd.MismatchError, match="rank 0 has joined"):
            keras_hvd.allgather_object(1)
        with pytest.raises(keras_hvd.MismatchError, match="rank 0 has joined"):
            keras_hvd.add_process_set([0])
    if pair is not None and rank == size - 1:
        with pytest.raises(
            tf.errors.FailedPreconditionError, match="rank 0 has joined"
        ):
            keras_hvd.allreduce(1, op=Sum, process_set=pair)
    keras_hvd.join()
    assert keras_hvd.remove_process_set(others)
    if pair is not None:
        assert keras_hvd.remove_process_set(pair)
