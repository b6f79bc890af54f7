"""broadcast_variables."""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd


def variables(rank):
    return [
        tf.Variable(tf.fill([3, 2], float(rank))),
        tf.Variable(rank, dtype=tf.int64),
        tf.Variable(rank > 0),
        tf.Variable([rank, rank], dtype=tf.uint32),
        tf.Variable(tf.zeros([0, 4])),
        keras.Variable(np.full([5], rank), dtype="float16"),
        keras.Variable([rank], dtype="uint32"),
    ]


def test_every_root(run, rank, size):
    for root in range(size):
        mine = variables(rank)
        run(functools.partial(keras_hvd.broadcast_variables, mine, root))()
        for got, wanted in zip(mine, variables(root), strict=True):
            np.testing.assert_array_equal(
                tf.convert_to_tensor(got), tf.convert_to_tensor(wanted)
            )


@pytest.mark.parametrize("name", [None, "by the user"])
def test_in_place(run, name, rank, size):
    for root in range(size):
        mine = variables(rank)
        values = run(functools.partial(keras_hvd.broadcast_, mine, root, name))()
        for got, value, wanted in zip(mine, values, variables(root), strict=True):
            wanted = tf.convert_to_tensor(wanted)
            np.testing.assert_array_equal(tf.convert_to_tensor(got), wanted)
            np.testing.assert_array_equal(value, wanted)


def test_one_in_place(rank, size):
    variable = tf.Variable([rank, rank])
    value = keras_hvd.broadcast_(variable, size - 1)
    np.testing.assert_array_equal(value, [size - 1] * 2)
    np.testing.assert_array_equal(variable, [size - 1] * 2)
    with pytest.raises(TypeError, match="broadcast_ takes variables"):
        keras_hvd.broadcast_([tf.ones([2])], 0)


def test_a_whole_model_and_its_optimizer(rank, equal_on_all_ranks):
    keras.utils.set_random_seed(rank)
    model = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(8), keras.layers.Dropout(0.5)]
    )
    model.compile(keras.optimizers.Adam(0.1 * (rank + 1)), "mse")
    model.optimizer.build(model.trainable_variables)
    keras_hvd.broadcast_variables(model.variables, 0)
    keras_hvd.broadcast_variables(model.optimizer.variables, 0)
    assert equal_on_all_ranks(model.get_weights())
    assert equal_on_all_ranks([v.numpy() for v in model.optimizer.variables])
    assert model.optimizer.learning_rate.numpy() == np.float32(0.1)


def test_hundreds_twice_in_one_function(rank, size):
    many = [tf.Variable(float(i + 1000 * rank)) for i in range(200)]

    @tf.function
    def both():
        keras_hvd.broadcast_variables(many, 0)
        for variable in many[:10]:
            variable.assign_add(1000.0 * rank + 0.5)
        keras_hvd.broadcast_variables(many[:10], size - 1)

    both()
    of_last = [i + 1000 * (size - 1) + 0.5 for i in range(10)]
    assert [v.numpy() for v in many] == [*of_last, *map(float, range(10, 200))]


def test_in_place_twice_in_one_function(run, rank, size):
    variable = tf.Variable([float(rank), 7.0])

    def both():
        first = keras_hvd.broadcast_(variable, size - 1)
        variable.assign_add(first + [float(rank + 1), 0.0])
        return first, keras_hvd.broadcast_(variable, 0)

    first, second = run(both)()
    np.testing.assert_array_equal(first, [size - 1, 7])
    np.testing.assert_array_equal(second, [2 * (size - 1) + 1, 14])
    np.testing.assert_array_equal(variable, second)


@pytest.mark.usefixtures("several_ranks")
def test_no_variables_are_as_many_on_every_rank(rank, size):
    keras_hvd.broadcast_variables([], 0)
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        keras_hvd.broadcast_variables([tf.Variable(1.0)] * (rank == size - 1), 0)
    for text in ("one_element_per_variable", "bool[0]", "bool[1]"):
        assert text in str(error.value)
    assert keras_hvd.allreduce(1, op=keras_hvd.Sum) == size


def test_what_cannot_be_assigned_is_refused():
    with pytest.raises(TypeError, match="assign"):
        keras_hvd.broadcast_variables([tf.ones([2])], 0)


@pytest.mark.usefixtures("several_ranks")
def test_lists_that_differ_are_an_error_on_every_rank(rank, size):
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        keras_hvd.broadcast_variables([tf.Variable(1.0)] * (2 + (rank == 0)), 0)
    for text in ("one_element_per_variable", "bool[2]", "bool[3]"):
        assert text in str(error.value)
    assert keras_hvd.allreduce(1, op=keras_hvd.Sum) == size


@pytest.mark.usefixtures("several_ranks")
def test_shapes_that_differ_are_an_error_on_every_rank(rank, size):
    with pytest.raises(tf.errors.FailedPreconditionError, match="broadcast_variables"):
        keras_hvd.broadcast_variables([tf.Variable(tf.ones([2 + rank]))], 0)
    assert keras_hvd.allreduce(1, op=keras_hvd.Sum) == size


def test_again_and_again_without_a_warning():
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    tf.get_logger().addHandler(handler)
    try:
        for _ in range(10):
            keras_hvd.broadcast_variables([tf.Variable(1.0)], 0)
    finally:
        tf.get_logger().removeHandler(handler)
    assert not warnings
