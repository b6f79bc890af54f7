"""Ranks with different numbers of steps: an error on all of them, and no waiting."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.callbacks import BroadcastGlobalVariables, MetricAverage

pytestmark = pytest.mark.usefixtures("several_ranks")


class Steps(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.made = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.made = 0

    def on_train_batch_end(self, batch, logs=None):
        self.made += 1


BATCH = 4
RATE = 0.01


def rows(count: int, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The first rows of a rank, this one unless told; each rank has its own."""
    generator = np.random.default_rng(keras_hvd.rank() if rank is None else rank)
    both = generator.standard_normal((count, 5))
    return both[:, :3], both[:, 3:]


def unknown(batches: int) -> tf.data.Dataset:
    """Batches whose number is not known."""
    dataset = tf.data.Dataset.from_tensor_slices(rows(BATCH * batches))
    return dataset.filter(lambda x, y: True).batch(BATCH)


@pytest.fixture
def model(make_linear):
    return make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)))


def broadcast_weights(model) -> list[np.ndarray]:
    """Gives all ranks rank 0's weights, and returns them."""
    keras_hvd.broadcast_variables(model.weights, 0)
    return model.get_weights()


def batches_of_all_ranks(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The batches with which one process makes the steps of all ranks' `rows`."""
    of_ranks = [rows(BATCH * steps, rank) for rank in range(keras_hvd.size())]
    x, y = (np.stack(each, 1) for each in zip(*of_ranks))
    return [
        (
            x[begin : begin + BATCH].reshape(-1, 3),
            y[begin : begin + BATCH].reshape(-1, 2),
        )
        for begin in range(0, BATCH * steps, BATCH)
    ]


def gradient_descent(weights, batches) -> list[np.ndarray]:
    """The weights after one process' training, in NumPy."""
    kernel, bias = weights
    for x, y in batches:
        error = 2 * (x @ kernel + bias - y) / y.size
        kernel, bias = kernel - RATE * x.T @ error, bias - RATE * error.sum(0)
    return [kernel, bias]


def test_known_steps_are_compared_before_the_first(model, rank, raises_on_all_ranks):
    steps = Steps()
    with pytest.raises(RuntimeError) as caught:
        model.fit(
            *rows(40 + 4 * rank),
            batch_size=4,
            verbose=0,
            callbacks=[MetricAverage(), steps],
        )
    raises_on_all_ranks(
        caught.value,
        "different numbers of steps to make in an epoch: 10 on rank 0, 11 on rank 1",
        "keras_hvd.data.even",
        "steps_per_epoch",
    )
    assert steps.made == 0


def test_steps_per_epoch_makes_them_the_same(float64, model, rank, difference):
    x, y = rows(40 + 4 * rank)
    weights = broadcast_weights(model)
    model.fit(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),
        steps_per_epoch=10,
        verbose=0,
        callbacks=[BroadcastGlobalVariables(0)],
    )
    assert model.optimizer.iterations == 10
    wanted = gradient_descent(weights, batches_of_all_ranks(10))
    assert difference(model.get_weights(), wanted) < 1e-9


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("which", ["first", "last"])
def test_unknown_steps_end_with_the_epoch(
    which, validates, model, rank, size, raises_on_all_ranks
):
    has_less = rank == (0 if which == "first" else size - 1)
    made = [4] * size
    made[0 if which == "first" else -1] = 2
    with pytest.raises(RuntimeError) as caught:
        model.fit(
            unknown(2 if has_less else 4),
            epochs=2,
            verbose=0,
            validation_data=unknown(1 + rank) if validates else None,
            callbacks=[BroadcastGlobalVariables(0), MetricAverage()],
        )
    shown = ", ".join(f"{steps} on rank {peer}" for peer, steps in enumerate(made))
    raises_on_all_ranks(caught.value, f"steps made in epoch 1: {shown}")


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_that_ends_before_steps_per_epoch(model, rank, raises_on_all_ranks):
    dataset = unknown(3 if rank == 0 else 6)
    with pytest.raises(RuntimeError) as caught:
        model.fit(dataset, steps_per_epoch=6, verbose=0, callbacks=[MetricAverage()])
    raises_on_all_ranks(caught.value, "made in epoch 1: 3 on rank 0, 6 on rank 1")


@pytest.mark.parametrize("steps", [(3, 4), (3, 6), (4, 6), (1, 2)])
def test_several_steps_in_one_execution(
    steps, make_linear, rank, size, raises_on_all_ranks
):
    """Also where data runs out in the middle of one."""
    model = make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    model.compile(model.optimizer, model.loss, steps_per_execution=2)
    fewer, more = steps
    with pytest.raises(RuntimeError) as caught:
        model.fit(
            unknown(fewer if rank == size - 1 else more),
            verbose=0,
            callbacks=[MetricAverage(), Steps()],
        )
    raises_on_all_ranks(caught.value, f"made in epoch 1: {more} on rank 0, ")


def test_as_many_steps_in_executions_train(float64, model, difference):
    weights = broadcast_weights(model)
    model.compile(model.optimizer, model.loss, steps_per_execution=3)
    model.fit(unknown(7), epochs=2, verbose=0, callbacks=[MetricAverage(), Steps()])
    assert model.optimizer.iterations == 14
    wanted = gradient_descent(weights, batches_of_all_ranks(7) * 2)
    assert difference(model.get_weights(), wanted) < 1e-9


def test_as_many_unknown_steps_train(float64, model, difference):
    steps = Steps()
    weights = broadcast_weights(model)
    model.fit(
        unknown(5),
        epochs=3,
        verbose=0,
        validation_data=unknown(2),
        callbacks=[BroadcastGlobalVariables(0), MetricAverage(), steps],
    )
    assert steps.made == 5
    wanted = gradient_descent(weights, batches_of_all_ranks(5) * 3)
    assert difference(model.get_weights(), wanted) < 1e-9


def test_steps_that_some_ranks_know_train(float64, model, rank, difference):
    weights = broadcast_weights(model)
    known = tf.data.Dataset.from_tensor_slices(rows(BATCH * 5)).batch(BATCH)
    callbacks = [BroadcastGlobalVariables(0), MetricAverage()]
    data = known if rank == 0 else unknown(5)
    model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
    wanted = gradient_descent(weights, batches_of_all_ranks(5) * 2)
    assert difference(model.get_weights(), wanted) < 1e-9


def test_even_datasets_train(float64, model, rank, difference):
    dataset = keras_hvd.data.even(unknown(3 + rank))
    weights = broadcast_weights(model)
    model.fit(dataset, epochs=2, verbose=0, callbacks=[BroadcastGlobalVariables(0)])
    wanted = gradient_descent(weights, batches_of_all_ranks(3) * 2)
    assert difference(model.get_weights(), wanted) < 1e-9


def test_distributed_data_trains(float64, model, size, difference):
    x, y = rows(101, rank=0)
    samples = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = keras_hvd.data.distribute(samples, BATCH * size, drop_remainder=True)
    weights = broadcast_weights(model)
    model.fit(dataset, epochs=2, verbose=0, callbacks=[BroadcastGlobalVariables(0)])
    ends = range(BATCH * size, 102, BATCH * size)
    batches = [
        (x[end - BATCH * size : end], y[end - BATCH * size : end]) for end in ends
    ]
    wanted = gradient_descent(weights, batches * 2)
    assert difference(model.get_weights(), wanted) < 1e-9


def test_epochs_are_compared(model, rank, raises_on_all_ranks):
    with pytest.raises(RuntimeError) as caught:
        model.fit(*rows(8), epochs=2 + rank, verbose=0, callbacks=[MetricAverage()])
    raises_on_all_ranks(caught.value, "fit has epochs=2 on rank 0, 3 on rank 1")


def test_process_sets_make_their_own_steps(make_linear, rank, size):
    sets = [
        keras_hvd.add_process_set([0]),
        keras_hvd.add_process_set([*range(1, size)]),
    ]
    try:
        mine = sets[rank > 0]
        optimizer = keras_hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.01), process_set=mine
        )
        steps = Steps()
        make_linear(optimizer).fit(
            *rows(8 if rank == 0 else 12),
            batch_size=4,
            epochs=2,
            verbose=0,
            callbacks=[MetricAverage(process_set=mine), steps],
        )
        assert steps.made == (2 if rank == 0 else 3)
    finally:
        for each in sets:
            keras_hvd.remove_process_set(each)


def test_no_callback_has_numpy_warn_of_a_variable(model):
    # Plain Keras asks NumPy for a copy of a variable only where it saves.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(
            *rows(8),
            batch_size=4,
            verbose=0,
            callbacks=[BroadcastGlobalVariables(0), MetricAverage()],
        )
    assert not [each for each in caught if "__array__" in str(each.message)]
