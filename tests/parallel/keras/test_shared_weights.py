"""Weights that no gradient changes: layers assign them, or callbacks of some ranks."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.callbacks import BroadcastGlobalVariables, MetricAverage

pytestmark = pytest.mark.usefixtures("several_ranks")

DIFFER = "differ between ranks"


def compiled(*layers, rate=0.05, **arguments) -> keras.Model:
    model = keras.Sequential([keras.Input((1,)), *layers], name="model")
    model.compile(
        keras_hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), "mse", **arguments
    )
    return model


def differences(function) -> list[str]:
    """The warnings of weights that differ, while a function runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(each.message) for each in caught if DIFFER in str(each.message)]


# --- layers ------------------------------------------------------------------------


class Notes(keras.layers.Layer):
    """Keeps values of its training data."""

    def weight(self, name, aggregation, dtype="float32"):
        return self.add_weight(
            name=name,
            shape=(),
            initializer="zeros",
            dtype=dtype,
            trainable=False,
            aggregation=aggregation,
        )

    def build(self, shape):
        self.mean = self.weight("mean", "mean")
        self.largest = self.weight("largest", "mean", "int32")
        self.rows = self.weight("rows", "sum", "int64")
        self.total = self.weight("total", "sum")
        self.latest = self.weight("latest", "only_first_replica")
        self.steps = self.weight("steps", "none", "int32")

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(inputs))
            self.largest.assign(tf.cast(tf.reduce_max(inputs), "int32"))
            self.rows.assign_add(tf.shape(inputs, "int64")[0])
            self.total.assign_add(tf.reduce_sum(inputs))
            self.latest.assign(inputs[-1, 0])
            self.steps.assign_add(1)
        return inputs


class NotesOfTensorFlow(Notes):
    """The same in variables that Keras does not know."""

    def weight(self, name, aggregation, dtype="float32"):
        return tf.Variable(
            tf.zeros((), dtype),
            trainable=False,
            name=name,
            aggregation=tf.VariableAggregation[aggregation.upper()],
        )


def rows_of(rank: int) -> np.ndarray:
    """Two steps' data; the last batch is smaller, and all are of other sizes."""
    return np.arange(3.0 + 2 * rank, dtype="float32")[:, None] * (rank + 1)


def batches_of(rank: int) -> list[np.ndarray]:
    batch = 2 + rank
    rows = rows_of(rank)
    return [rows[:batch], rows[batch:]]


@pytest.mark.parametrize("kind", [Notes, NotesOfTensorFlow])
def test_what_layers_assign(rank, size, kind):
    notes = kind()
    model = compiled(notes, keras.layers.Dense(1))
    weights = notes.mean, notes.largest, notes.rows, notes.total, notes.latest
    seen: list[list[float]] = []

    class See(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            seen.append([float(each.numpy()) for each in weights])

    x = rows_of(rank)
    said = differences(
        lambda: model.fit(
            x,
            x,
            batch_size=2 + rank,
            epochs=3,
            shuffle=False,
            verbose=0,
            validation_data=(x, x),
            callbacks=[BroadcastGlobalVariables(0), MetricAverage(), See()],
        )
    )
    assert said == []
    wanted, mean, rows, total = [], 0.0, 0, 0.0
    for _ in range(3):
        means = []
        for peer in range(size):
            own = mean
            for batch in batches_of(peer):
                own = 0.5 * own + 0.5 * batch.mean()
            means.append(own)
        last = [batches_of(peer)[-1] for peer in range(size)]
        mean = np.mean(means)
        rows += sum(len(rows_of(peer)) for peer in range(size))
        total += sum(rows_of(peer).sum() for peer in range(size))
        largest = sum(int(each.max()) for each in last) // size
        wanted.append([mean, largest, rows, total, last[0][-1, 0]])
    np.testing.assert_allclose(seen, wanted, rtol=1e-6)
    assert notes.steps.numpy() == 6


class Tally(keras.layers.Layer):
    """Counts in a weight with some arguments."""

    def __init__(self, name, **arguments):
        super().__init__(name=name)
        self.arguments = arguments

    def build(self, shape):
        if "synchronization" in self.arguments:
            self.count = keras.Variable(0.0, trainable=False, **self.arguments)
            return
        self.count = self.add_weight(
            name="count",
            shape=(),
            initializer="zeros",
            trainable=False,
            **self.arguments,
        )

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(tf.reduce_sum(inputs))
        return inputs


def all_but_rank_0(size) -> str:
    return f"(rank {', '.join(map(str, range(1, size)))} not as rank 0)"


def test_other_weights_that_differ_are_named_once(rank, size):
    layers = [
        Tally("plain"),
        Tally("flag", dtype="bool", aggregation="mean"),
        Tally("own"),
        Tally("on_read", synchronization="on_read"),
    ]
    layers[1].call = lambda inputs, training=False: (
        layers[1].count.assign(tf.reduce_sum(inputs) > 0),
        inputs,
    )[1]
    model = compiled(*layers, keras.layers.Dense(1))
    ours = BroadcastGlobalVariables(0, local_variables=[layers[2].count])
    x = np.full((4, 1), rank, "float32")
    [said] = differences(lambda: model.fit(x, x, epochs=2, verbose=0, callbacks=[ours]))
    assert f"plain/count {all_but_rank_0(size)}" in said
    assert "flag/count" in said
    assert "own/count" not in said and "on_read" not in said
    assert 'aggregation="mean"' in said and "local_variables" in said


class Scales(tf.Module):
    def __init__(self, rank):
        super().__init__()
        self.scale = tf.Variable(rank + 2.0, name="scale")


class Projects(keras.layers.Layer):
    """Has variables of TensorFlow, in lists and modules too, that differ at first."""

    def __init__(self, rank):
        super().__init__(name="projects")
        self.weights_by_hand = [tf.Variable([rank + 1.0], name="by_hand")]
        self.module = Scales(rank)
        self.own = tf.Variable(float(rank), name="own", trainable=False)
        self.queue = tf.Variable(
            tf.zeros([rank]), shape=[None], name="queue", trainable=False
        )

    def call(self, inputs, training=False):
        [weight] = self.weights_by_hand
        if training:
            weight.assign_add([tf.reduce_sum(inputs)])
        return inputs * weight * self.module.scale + self.own


def test_variables_of_tensorflow_start_equal_and_are_named(rank):
    layer = Projects(rank)
    model = compiled(layer, keras.layers.Dense(1))
    ours = BroadcastGlobalVariables(0, local_variables=[layer.own])
    x = np.full((4, 1), rank, "float32")
    [said] = differences(lambda: model.fit(x, x, verbose=0, callbacks=[ours]))
    assert "projects/by_hand (rank 1" in said
    assert "scale" not in said and "own (" not in said and "queue" not in said
    assert float(layer.weights_by_hand[0][0]) == 1 + 4 * rank
    assert float(layer.module.scale) == 2
    assert float(layer.own) == rank and len(layer.queue.numpy()) == rank


def test_states_of_a_ranks_own_rows_may_differ(rank):
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(2, 3, 1)),
            keras.layers.SimpleRNN(2, stateful=True),
        ]
    )
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse")
    x = np.full((2, 3, 1), rank + 1, "float32")
    fit = {"verbose": 0, "callbacks": [BroadcastGlobalVariables(0)]}
    assert differences(lambda: model.fit(x, x[:, 0] + [0, 1], **fit)) == []
    states = keras_hvd.allgather_object(model.layers[0].states[0].numpy())
    assert np.abs(states[0] - states[1]).max() > 0


def test_local_layers_of_tapes_may_differ(rank, equal_on_all_ranks):
    head = keras.layers.Dense(1, name="head")

    class Model(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            tape = keras_hvd.PartialDistributedGradientTape(tape, local_layers=head)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    model = Model([keras.Input((1,)), keras.layers.Dense(2), head])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.full((4, 1), rank + 1, "float32")
    fit = {"verbose": 0, "callbacks": [BroadcastGlobalVariables(0)]}
    assert differences(lambda: model.fit(x, x, **fit)) == []
    assert equal_on_all_ranks(model.layers[0].get_weights())
    assert not equal_on_all_ranks(head.get_weights())


# --- callbacks of some ranks -------------------------------------------------------


def fit_towards(target, own, epochs=2, aims=None):
    """Trains one weight from 0 towards a number, and returns the model.

    In each epoch, of two steps, it goes 19 % of the way. Validation is best at `aims`.
    """
    line = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="zeros", name="line"
    )
    model = compiled(line)
    x = np.ones((8, 1), "float32")
    model.fit(
        x,
        target * x,
        batch_size=4,
        epochs=epochs,
        verbose=0,
        validation_data=None if aims is None else (x, aims * x),
        callbacks=[BroadcastGlobalVariables(0), *own],
    )
    return model


def weights_of_ranks(model) -> list[float]:
    return keras_hvd.allgather_object(float(model.get_weights()[0][0, 0]))


def test_best_weights_of_one_rank(rank, size):
    stopping = keras.callbacks.EarlyStopping(
        "val_loss", patience=2, restore_best_weights=True
    )
    own = [stopping] if rank == size - 1 else []
    model = fit_towards(10, own, epochs=30, aims=2)
    after_first_epoch = 10 * (1 - 0.9**2)
    np.testing.assert_allclose(weights_of_ranks(model), after_first_epoch, rtol=1e-5)


def sets_weights(hook: str, value: float, when: int = 0) -> keras.callbacks.Callback:
    """A callback that sets the weight in one of its hooks, once."""
    callback = keras.callbacks.LambdaCallback()

    def run(*arguments, **logs):
        called.append(arguments)
        if len(called) == when + 1:
            callback.model.set_weights([np.full((1, 1), value)])

    called: list = []
    setattr(callback, hook, run)
    return callback


def test_weights_set_at_the_end_on_one_rank(rank, size):
    own = [sets_weights("on_train_end", 7.0)] if rank == size - 1 else []
    assert weights_of_ranks(fit_towards(10, own)) == [7.0] * size


def test_statistics_set_at_the_end_on_one_rank(rank, size):
    normalization = keras.layers.BatchNormalization()
    model = compiled(normalization, keras.layers.Dense(1))
    own = keras.callbacks.LambdaCallback()
    if rank == 0:
        own.on_train_end = lambda logs: normalization.moving_mean.assign([5.0])
    x = np.full((4, 1), rank, "float32")
    model.fit(x, x, verbose=0, callbacks=[BroadcastGlobalVariables(0), own])
    means = keras_hvd.allgather_object(float(normalization.moving_mean[0]))
    assert means == [5.0] * size


def test_weights_set_differently_at_the_end(rank, raises_on_all_ranks):
    with pytest.raises(RuntimeError) as raised:
        fit_towards(10, [sets_weights("on_train_end", rank)])
    raises_on_all_ranks(raised.value, "line/kernel", "LambdaCallback")


@pytest.mark.parametrize(
    "hook, when, epochs",
    [
        ("on_epoch_end", 0, 2),
        ("on_epoch_begin", 1, 2),
        ("on_test_end", 0, 2),
        ("on_epoch_end", 1, 2),
    ],
)
def test_weights_set_between_epochs_on_one_rank(
    hook, when, epochs, rank, size, raises_on_all_ranks
):
    own = [sets_weights(hook, 7.0, when)] if rank == 0 else []
    with pytest.raises(RuntimeError) as raised:
        fit_towards(10, own, epochs, aims=2)
    raises_on_all_ranks(
        raised.value,
        "callbacks have changed weights",
        f"line/kernel {all_but_rank_0(size)}",
        "Only some ranks have the callback LambdaCallback (on rank 0)",
    )


def test_weights_set_on_a_rank_that_a_callback_chooses(rank, raises_on_all_ranks):
    class Chooses(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank == 0:
                self.model.set_weights([np.ones((1, 1))])

    with pytest.raises(RuntimeError) as raised:
        fit_towards(10, [Chooses()])
    raises_on_all_ranks(raised.value, "line/kernel", "that may do so are Chooses")


def test_weights_set_alike_on_all_ranks(size):
    model = fit_towards(10, [sets_weights("on_epoch_end", 7.0)])
    np.testing.assert_allclose(weights_of_ranks(model), 10 - 3 * 0.9**2, rtol=1e-5)


def test_weights_set_between_steps_on_one_rank(rank, size):
    own = [sets_weights("on_train_batch_end", 7.0)] if rank == 0 else []
    [said] = differences(lambda: fit_towards(10, own))
    assert f"line/kernel {all_but_rank_0(size)}" in said
    assert "Only some ranks have the callback LambdaCallback (on rank 0)" in said


@pytest.mark.parametrize(
    "callback",
    [
        lambda: keras.callbacks.ReduceLROnPlateau("loss", 0.5, 0, min_delta=99.0),
        lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
    ],
    ids=["plateau", "scheduler"],
)
def test_learning_rates_of_one_rank(callback, rank, size, raises_on_all_ranks):
    own = [callback()] if rank == size - 1 else []
    with pytest.raises(RuntimeError) as raised:
        fit_towards(10, own, epochs=4)
    raises_on_all_ranks(
        raised.value,
        "learning rate",
        f"Only some ranks have the callback {type(callback()).__name__} "
        f"(on rank {size - 1})",
    )
