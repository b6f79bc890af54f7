"""Optimizers, tapes, layers and metrics of some ranks only: two sets train at once."""

import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.backends import equal_start as neutral
from keras_hvd.backends.tensorflow.gradients import equal_start
from keras_hvd.callbacks.metrics import means_over_ranks


@pytest.fixture
def sets(several_ranks, size):
    """The ranks of even and of odd number."""
    added = [keras_hvd.add_process_set(range(i, size, 2)) for i in range(2)]
    yield added
    for each in added:
        assert keras_hvd.remove_process_set(each)


def test_optimizer(run, sets, rank):
    mine = sets[rank % 2]
    shared, local = (keras.Variable([0.0], name=name) for name in ("shared", "local"))
    table = keras.Variable(np.zeros((2, 1), "float32"), name="table")
    scale = keras.Variable([0.0], name="scale")
    scale.overwrite_with_gradient = True
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), process_set=mine
    )
    optimizer.register_local_var(local)
    variables = [shared, local, table, scale]
    optimizer.build(variables)

    def step():
        value = tf.constant([float(rank)])
        slices = tf.IndexedSlices(value[None], tf.constant([1]), [2, 1])
        optimizer.apply([value, value, slices, value], variables)

    run(step)()
    mean = np.mean(mine.ranks)
    np.testing.assert_allclose(shared, [-mean])
    np.testing.assert_allclose(local, [-rank / mine.size()], rtol=1e-6)
    np.testing.assert_allclose(table, [[0.0], [-mean]])
    np.testing.assert_allclose(scale, [max(mine.ranks)])


def test_tape(run, sets, rank):
    mine = sets[rank % 2]
    w = tf.Variable([1.0], name="w")

    def compute():
        with tf.GradientTape() as tape:
            loss = (rank + 1.0) * w
        tape = keras_hvd.DistributedGradientTape(
            tape, op=keras_hvd.Sum, process_set=mine
        )
        return tape.gradient(loss, w)

    np.testing.assert_allclose(run(compute)(), [sum(r + 1 for r in mine.ranks)])


def test_loss_scale(sets, rank):
    """A set skips a step alone."""
    variable = keras.Variable([0.0], name="v")
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 1.0),
        process_set=sets[rank % 2],
    )
    optimizer.apply([tf.constant([np.inf if rank == 0 else 1.0])], [variable])
    np.testing.assert_allclose(variable, [0.0 if rank % 2 == 0 else -1.0])


def test_sync_batch_normalization(sets, rank):
    mine = sets[rank % 2]
    layer = keras_hvd.SyncBatchNormalization(momentum=0.0, process_set=mine)
    layer(np.full((2, 1), rank, "float32"), training=True)
    np.testing.assert_allclose(layer.moving_mean, [np.mean(mine.ranks)])
    np.testing.assert_allclose(layer.moving_variance, [np.var(mine.ranks)], rtol=1e-6)


def test_metrics(sets, rank):
    """The logs of a set are those of its ranks' data."""
    mine = sets[rank % 2]
    keras.utils.clear_session()
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.0), process_set=mine
    )
    model.compile(optimizer, "mse")
    x, y = np.ones((2, 1), "float32"), np.full((2, 1), rank, "float32")
    average = keras_hvd.callbacks.MetricAverage(device="/gpu:7", process_set=mine)
    history = model.fit(
        x, y, verbose=0, validation_data=(x, y + 1), callbacks=[average]
    )
    members = np.array(mine.ranks, float)
    np.testing.assert_allclose(history.history["loss"], [np.mean(members**2)])
    of_validation = [np.mean((members + 1) ** 2)]
    np.testing.assert_allclose(history.history["val_loss"], of_validation)


def test_logs_that_are_no_metrics(sets, rank):
    mine = sets[rank % 2]
    expected = np.mean(np.square(mine.ranks))
    assert means_over_ranks({"own": rank**2}, mine) == {"own": expected}


def test_layer_of_another_set(sets, rank):
    """Also of a set of one rank, which has nothing to reduce."""
    layer = keras_hvd.SyncBatchNormalization(process_set=sets[1 - rank % 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not in process set"):
        layer(np.ones((1, 1), "float32"), training=True)


def test_rank_outside_compares_no_weights(sets, rank, monkeypatch):
    """It has no other rank to compare them with, so it starts no thread for that."""
    monkeypatch.setattr(equal_start, "_compared", set())
    monkeypatch.setattr(equal_start, "_comparisons", comparisons := [])
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), process_set=sets[0]
    )
    optimizer.apply([tf.constant([1.0])], [keras.Variable([0.0])])
    assert len(comparisons) == (rank in sets[0].ranks)
    for each in comparisons:
        each.result.join()


def test_a_set_compares_weights_before_it_is_removed(rank, size, monkeypatch):
    """A rank's comparison may begin when another removes the set."""
    if size < 3:
        pytest.skip("needs a set of some of the ranks")
    others_remove = threading.Event()

    plain = neutral.compare

    def late(*args):
        if rank == size - 1:
            others_remove.wait(30)
        plain(*args)

    monkeypatch.setattr(neutral, "compare", late)
    last_two = keras_hvd.add_process_set(range(size - 2, size))
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), process_set=last_two
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.apply([tf.constant([1.0])], [keras.Variable([float(rank)])])
        if rank == size - 1:
            threading.Timer(0.2, others_remove.set).start()
        assert keras_hvd.remove_process_set(last_two)
    texts = [str(each.message) for each in caught]
    is_told = any("begun to train with different weights" in each for each in texts)
    assert is_told == (rank == size - 2)


def test_rank_outside_trains_alone(run, sets, rank):
    """A rank outside of the set has its own gradients from optimizers and tapes."""
    of_even, w = keras.Variable([0.0], name="w"), tf.Variable([1.0], name="v")
    table = keras.Variable(np.zeros((2, 1), "float32"), name="table")
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), process_set=sets[0]
    )
    optimizer.build([of_even, table])

    def step():
        value = tf.constant([rank**2.0])
        twice = tf.IndexedSlices([value, value], tf.constant([1, 1]), [2, 1])
        optimizer.apply([value, twice], [of_even, table])
        with tf.GradientTape() as tape:
            loss = (rank**2.0 + 1) * w
        tape = keras_hvd.DistributedGradientTape(tape, process_set=sets[0])
        return tape.gradient(loss, w)

    gradient = run(step)()
    own = rank**2 if rank % 2 else np.mean(np.square(sets[0].ranks))
    np.testing.assert_allclose(of_even, [-own])
    np.testing.assert_allclose(table, [[0.0], [-2 * own]])
    np.testing.assert_allclose(gradient, [own + 1])


def test_rank_outside_keeps_a_loss_scale_of_its_own(sets, rank):
    variable = keras.Variable([0.0], name="v")
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 1.0),
        process_set=sets[0],
    )
    optimizer.apply([tf.constant([np.inf if rank == 1 else 1.0])], [variable])
    np.testing.assert_allclose(variable, [0.0 if rank == 1 else -1.0])


class TapeModel(keras.Model):
    """Takes the gradients of a tape that reduces over some ranks."""

    def __init__(self, process_set):
        super().__init__()
        self.layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        self.process_set = process_set

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        tape = keras_hvd.DistributedGradientTape(tape, process_set=self.process_set)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


@pytest.mark.parametrize("by", ["optimizer", "tape"])
def test_fit_of_a_rank_outside(by, sets, rank):
    """With callbacks, a model whose weights the first step makes, and more steps.

    A tape's set is not known beforehand, so there the ranks have equally many steps.
    """
    if by == "tape":
        model = TapeModel(sets[0])
        model(np.ones((1, 1), "float32"))
        model.compile(keras.optimizers.SGD(0.5))
    else:
        initializer = keras.initializers.Constant(rank)
        model = keras.Sequential(
            [keras.layers.Dense(1, use_bias=False, kernel_initializer=initializer)]
        )
        model.compile(
            keras_hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.5), process_set=sets[0]
            ),
            "mse",
        )
    # With x = 1, one step with 0.5 goes to the mean of the targets.
    steps = 1 + (by == "optimizer" and rank % 2)
    x = np.ones((steps, 1), "float32")
    y = np.full((steps, 1), rank**2, "float32")
    callbacks = [keras_hvd.callbacks.BroadcastGlobalVariables(0)]
    model.fit(x, y, batch_size=1, verbose=0, callbacks=callbacks)
    own = rank**2 if rank % 2 else np.mean(np.square(sets[0].ranks))
    np.testing.assert_allclose(model.get_weights()[0], [[own]])


def test_moving_statistics_are_those_of_the_set(sets, rank):
    mine = sets[rank % 2]
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0)]
    )
    model.compile(
        keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), process_set=mine),
        "mse",
    )
    x = np.full((2, 1), rank**2, "float32")
    callbacks = [keras_hvd.callbacks.BroadcastGlobalVariables(0)]
    model.fit(x, x, verbose=0, callbacks=callbacks)
    mean = np.mean(np.square(mine.ranks))
    np.testing.assert_allclose(model.layers[0].moving_mean, [mean])


def test_set_that_was_removed(several_ranks, size):
    removed = keras_hvd.add_process_set(range(size - 1))
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), process_set=removed
    )
    assert keras_hvd.remove_process_set(removed)
    with pytest.raises(ValueError, match="not part of the job"):
        optimizer.apply([tf.constant([1.0])], [keras.Variable([1.0])])


def test_statistics_are_averaged_in_a_set(sets, rank):
    """Each set trains a model of its own, and no warning says that the sets' differ."""
    mine = sets[rank % 2]
    normalization = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential(
        [keras.Input((1,)), normalization, keras.layers.Dense(1)], name="model"
    )
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), process_set=mine
    )
    model.compile(optimizer, "mse")
    x = np.full((4, 1), rank**2, "float32")
    callbacks = [keras_hvd.callbacks.BroadcastGlobalVariables(0)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "weights of model")
        model.fit(x, x + rank % 2, epochs=2, verbose=0, callbacks=callbacks)
    mean = np.mean(np.square(mine.ranks))
    np.testing.assert_allclose(normalization.moving_mean, [0.75 * mean], rtol=1e-6)
    of_ranks = keras_hvd.allgather_object(model.layers[1].get_weights()[1].item())
    assert of_ranks[rank] == of_ranks[mine.ranks[0]]
    assert of_ranks[0] != of_ranks[1]
