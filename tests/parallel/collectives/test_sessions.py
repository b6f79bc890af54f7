"""Graphs and sessions of TensorFlow 1, where only the ops that are asked for run."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.ref_variable import RefVariable

import keras_hvd
from keras_hvd.backends.tensorflow.gradients import equal_start

KINDS = {
    "resource": tf.Variable,
    "reference": RefVariable,
    "keras": lambda start: keras.Variable(start, dtype="float64"),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        yield session


def starts_of(rank):
    return [100.0 * rank + np.arange(float(n)) for n in (1, 2, 5)]


def variables_in(session, kind, rank):
    variables = [KINDS[kind](start) for start in starts_of(rank)]
    session.run(tf.compat.v1.global_variables_initializer())
    return variables


def assert_equal(results, expected):
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, wanted)


def read(session, variables):
    return session.run([tf.convert_to_tensor(variable) for variable in variables])


@each_kind
def test_a_value_that_is_evaluated_has_been_assigned(kind, session, rank, size):
    for root in range(size):
        variables = variables_in(session, kind, rank)
        value = keras_hvd.broadcast_(variables[2], root)
        assert_equal([session.run(value)], starts_of(root)[2:])
        expected = [*starts_of(rank)[:2], starts_of(root)[2]]
        assert_equal(read(session, variables), expected)


@each_kind
def test_one_of_several_values_assigns_all(kind, session, rank, size):
    variables = variables_in(session, kind, rank)
    values = keras_hvd.broadcast_(variables, size - 1, name="several")
    assert_equal([session.run(values[1])], starts_of(size - 1)[1:2])
    assert_equal(read(session, variables), starts_of(size - 1))


@each_kind
def test_broadcast_variables_gives_the_op(kind, session, rank, size):
    variables = variables_in(session, kind, rank)
    op = keras_hvd.broadcast_variables(variables, size - 1)
    assert_equal(read(session, variables), starts_of(rank))
    assert session.run(op) is None
    assert_equal(read(session, variables), starts_of(size - 1))


@pytest.mark.usefixtures("several_ranks")
def test_a_rank_without_variables_is_an_error(session, rank):
    variables = variables_in(session, "resource", rank) if rank == 0 else []
    op = keras_hvd.broadcast_variables(variables, 0)
    with pytest.raises(tf.errors.FailedPreconditionError, match="one_element_per_var"):
        session.run(op)
    assert_equal(read(session, variables), starts_of(rank)[: len(variables)])


def test_barrier_gives_the_op(session, counters):
    op = keras_hvd.barrier()
    before = counters().tensors
    session.run(op)
    assert counters().tensors == before + 1


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
def test_gradients_of_a_tape(wrap, session, rank, size, monkeypatch):
    """As the first ones of a job, whose variables are compared if they have values."""
    monkeypatch.setattr(equal_start, "_compared", set())
    (variable,) = variables_in(session, "resource", rank)[:1]

    @wrap
    def step():
        with keras_hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = variable * (rank + 1.0)
        return tape.gradient(loss, variable)

    assert_equal([session.run(step())], [[(size + 1) / 2]])
