"""The reductions of a model's step, known from the step and not its configuration.

The right weights are those of one process, which has the rows of all ranks.
"""

import warnings
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.backends.tensorflow import current_strategy
from keras_hvd.backends.tensorflow.collectives import reductions
from keras_hvd.backends.tensorflow.gradients import equal_start
from keras_hvd.callbacks import BroadcastGlobalVariables, MetricAverage
from keras_hvd.optimizer import traced_steps

RATE = 0.05


def network(kind: type = keras.Sequential, **compiled) -> keras.Model:
    """A small model with fixed weights."""
    model = kind(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, "tanh", name="first"),
            keras.layers.Dense(2, name="second"),
        ],
        name="model",
    )
    values = np.linspace(-0.5, 0.5, 26).astype("float32")
    model.set_weights(
        [
            part.reshape(weight.shape)
            for part, weight in zip(np.split(values, [12, 16, 24]), model.weights)
        ]
    )
    if compiled:
        model.compile(loss=keras.losses.MeanSquaredError(), **compiled)
    return model


def plain() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(RATE, momentum=0.5)


def fit(model, points, **arguments):
    x, y = points
    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(x, y, **arguments)


def ours() -> list[keras.callbacks.Callback]:
    return [BroadcastGlobalVariables(0), MetricAverage()]


@pytest.fixture
def of_rank(points, part_of_batches, size) -> tuple[np.ndarray, np.ndarray]:
    if len(points[0]) % (4 * size):
        pytest.skip(f"{size} ranks do not share the rows in whole batches")
    return tuple(part_of_batches(rows, 4) for rows in points)


@pytest.fixture
def alone(points, size) -> Callable[..., list[np.ndarray]]:
    """The weights after some epochs of one process."""

    def train(epochs: int) -> list[np.ndarray]:
        model = network(optimizer=plain())
        fit(model, points, batch_size=4 * size, epochs=epochs)
        return model.get_weights()

    return train


HOW = {
    "fit with callbacks": ({}, lambda model, data: fit(model, data, callbacks=ours())),
    "fit": ({}, fit),
    "eager": ({"run_eagerly": True}, lambda m, data: fit(m, data, callbacks=ours())),
    "several steps": ({"steps_per_execution": 2}, fit),
    "xla": ({"jit_compile": True}, fit),
}


def train_on_batches(model, data):
    x, y = data
    for first in range(0, len(x), 4):
        model.train_on_batch(x[first : first + 4], y[first : first + 4])


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=pytest.mark.needs_xla if how == "xla" else ())
        for how in [*HOW, "train_on_batch"]
    ],
)
def test_optimizer_distributed_after_training(how, points, of_rank, alone, difference):
    compiled, train = HOW.get(how, ({}, train_on_batches))
    model = network(optimizer=plain(), **compiled)
    # The same on all ranks, in the batches of one process.
    fit(model, points, batch_size=4 * keras_hvd.size())
    keras_hvd.DistributedOptimizer(model.optimizer)
    train(model, of_rank)
    assert difference(model.get_weights(), alone(2)) < 1e-6


def test_variable_made_local_after_training(of_rank, rank, several_ranks):
    model = network(optimizer=keras_hvd.DistributedOptimizer(plain()))
    fit(model, of_rank, callbacks=ours())
    bias = model.layers[-1].bias
    model.optimizer.register_local_var(bias)
    fit(model, of_rank, callbacks=ours())
    of_ranks = keras_hvd.allgather_object(model.get_weights())
    assert np.abs(of_ranks[0][-1] - of_ranks[1][-1]).max() > 1e-3
    np.testing.assert_array_equal(of_ranks[0][0], of_ranks[1][0])


def test_step_is_traced_once(of_rank):
    """Other optimizers that are distributed meanwhile do not matter."""
    traces = []

    class Counting(keras.Sequential):
        def train_step(self, data):
            traces.append(None)
            return super().train_step(data)

    model = network(Counting, optimizer=keras_hvd.DistributedOptimizer(plain()))
    fit(model, of_rank, callbacks=ours())
    before = len(traces)
    keras_hvd.DistributedOptimizer(plain())
    fit(model, of_rank, callbacks=ours())
    fit(model, of_rank)
    train_on_batches(model, of_rank)
    # NumPy's batches in train_on_batch have a spec of their own.
    assert len(traces) <= before + 1


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        self.update(tape.gradient(loss, self.trainable_weights))
        return {"loss": loss}

    def update(self, gradients):
        self.optimizer.apply(gradients, self.trainable_weights)


class Allreducing(OwnStep):
    def update(self, gradients):
        super().update([keras_hvd.allreduce(each) for each in gradients])


class Grouping(OwnStep):
    def update(self, gradients):
        super().update(keras_hvd.grouped_allreduce(gradients))


class Scattering(OwnStep):
    """Each rank reduces a part of all gradients, as with a sharded state."""

    def update(self, gradients):
        flat = tf.concat([tf.reshape(each, [-1]) for each in gradients], 0)
        flat = keras_hvd.allgather(keras_hvd.reducescatter(flat))
        parts = tf.split(flat, [tf.size(each) for each in gradients])
        shaped = [tf.reshape(p, g.shape) for p, g in zip(parts, gradients)]
        super().update(shaped)


class Accumulating(OwnStep):
    """Adds up gradients of one batch; reduces in a branch, and clips."""

    def update(self, gradients):
        def reduced():
            return keras_hvd.grouped_allreduce(gradients)

        ready = tf.equal(self.optimizer.iterations % 1, 0)
        gradients = tf.cond(ready, reduced, lambda: gradients)
        super().update(tf.clip_by_global_norm(gradients, 1e6)[0])


class Calling(Allreducing):
    """Its step is a function that is traced only once."""

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize(
    "kind", [Allreducing, Grouping, Scattering, Accumulating, Calling]
)
def test_step_that_reduces_by_itself(kind, eager, of_rank, alone, difference):
    model = network(kind, optimizer=plain(), run_eagerly=eager)
    fit(model, of_rank, callbacks=ours())
    model.compile(model.optimizer, loss="mse", run_eagerly=eager)
    fit(model, of_rank, callbacks=ours())
    assert difference(model.get_weights(), alone(2)) < 1e-6


class NothingReduced(OwnStep):
    pass


class Synchronizing(OwnStep):
    """Meets the other ranks in its forward pass only."""

    def call(self, inputs, training=False):
        outputs = super().call(inputs, training=training)
        return outputs + 0 * keras_hvd.allreduce(tf.reduce_mean(outputs))


class UpdatingByHand(OwnStep):
    def update(self, gradients):
        for weight, gradient in zip(self.trainable_weights, gradients):
            weight.assign_sub(RATE * gradient)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("kind", [NothingReduced, Synchronizing, UpdatingByHand])
def test_step_that_reduces_nothing_is_refused(
    kind, eager, of_rank, several_ranks, raises_on_all_ranks
):
    model = network(kind, optimizer=plain(), run_eagerly=eager)
    with pytest.raises(RuntimeError) as error:
        fit(model, of_rank, callbacks=ours())
    raises_on_all_ranks(error.value, "would train without reducing", "SGD 'sgd'")


class StaleStep(OwnStep):
    """Keeps its own traced function, which does not know of a later optimizer."""

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


def test_function_traced_before_the_optimizer_was_distributed_is_refused(
    of_rank, several_ranks, raises_on_all_ranks
):
    model = network(StaleStep, optimizer=plain())
    fit(model, of_rank)
    keras_hvd.DistributedOptimizer(model.optimizer)
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        fit(model, of_rank)
    raises_on_all_ranks(error.value, "traced before optimizer 'sgd")


class ReducingItsLoss(OwnStep):
    def train_step(self, data):
        logs = super().train_step(data)
        return {"loss": keras_hvd.allreduce(logs["loss"])}


def test_step_that_reduces_something_else_is_warned_of(of_rank, rank, several_ranks):
    model = network(ReducingItsLoss, optimizer=plain())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, of_rank, callbacks=ours())
    said = [str(each.message) for each in caught]
    found = [each for each in said if "reduces 1 numbers" in each]
    assert len(found) == (1 if rank == 0 else 0), said


@pytest.mark.parametrize("build", [True, False], ids=["built", "built later"])
def test_plain_optimizer_without_anything_to_train(build, points):
    model = keras.Sequential([keras.layers.Rescaling(2.0)])
    if build:
        model.build((None, 3))
    model.compile("sgd", "mse")
    x = points[0]
    fit(model, (x, 2 * x), callbacks=ours())


@pytest.fixture
def new_process(monkeypatch) -> None:
    """As in a process that has not trained yet."""
    monkeypatch.setattr(traced_steps, "_trainings", traced_steps._Trainings())
    monkeypatch.setattr(reductions, "_handed_over", 0)
    monkeypatch.setattr(equal_start, "_compared", set())
    monkeypatch.setattr(equal_start, "_comparisons", [])
    monkeypatch.setattr(equal_start, "_given", (None, set()))
    # However long another rank has no core.
    monkeypatch.setattr(equal_start, "_PATIENCE_SECONDS", 60)


def at_exit() -> list[str]:
    """The warnings when Python ends."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced_steps._warn_of_separate_trainings()
        equal_start._at_exit()
    return [str(each.message) for each in caught]


def trained_alone() -> keras.Model:
    return network(optimizer=plain())


def trained_in_mirrored_strategy() -> keras.Model:
    with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
        return network(optimizer=plain())


def trained_outside_of_the_strategy() -> keras.Model:
    keras_hvd.Strategy()
    return network(optimizer=plain())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (trained_alone, "Pass optimizer=keras_hvd.DistributedOptimizer"),
        (trained_in_mirrored_strategy, "a MirroredStrategy, which knows of this"),
        (trained_outside_of_the_strategy, "outside of the scope of the keras_hvd"),
    ],
)
def test_separate_trainings(
    make, said, points, rank, size, several_ranks, new_process, monkeypatch
):
    monkeypatch.setattr(current_strategy, "_was_made", False)
    fit(make(), points)
    found = at_exit()
    assert len(found) == (1 if rank == 0 else 0)
    if rank == 0:
        assert f"each of the {size} ranks has trained a model 'model'" in found[0]
        assert said in found[0]


def test_another_training_of_one_rank(points, of_rank, several_ranks, new_process):
    fit(trained_alone(), points)
    model = network(optimizer=keras_hvd.DistributedOptimizer(plain()))
    fit(model, of_rank)
    assert at_exit() == []


def started(rank: int, *callbacks, **compiled) -> keras.Model:
    """A model whose weights differ between ranks."""
    optimizer = keras_hvd.DistributedOptimizer(plain())
    model = network(optimizer=optimizer, **compiled)
    model.set_weights([weight + rank for weight in model.get_weights()])
    return model


DIFFERENT = "begun to train with different weights"


def in_fit(model, points):
    fit(model, points)


def by_hand(model, points):
    tape_step(model, points, distributed=False)


def by_tape(model, points):
    tape_step(model, points, distributed=True)


def tape_step(model, points, distributed):
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        if distributed:
            tape = keras_hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)

    optimizer = plain() if distributed else model.optimizer
    step(*points)


@pytest.mark.parametrize("train", [in_fit, by_hand, by_tape])
def test_different_weights_at_the_start(
    train, points, rank, several_ranks, new_process
):
    train(started(rank), points)
    found = at_exit()
    assert len(found) == (1 if rank == 0 else 0)
    assert all(DIFFERENT in each for each in found)
    assert at_exit() == []


def test_different_weights_are_told_after_an_epoch(
    points, rank, several_ranks, new_process
):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comparing = keras.callbacks.LambdaCallback(on_epoch_begin=await_comparisons)
        callbacks = [MetricAverage(), comparing]
        fit(started(rank), points, epochs=2, callbacks=callbacks)
    said = [str(each.message) for each in caught]
    assert sum(DIFFERENT in each for each in said) == (1 if rank == 0 else 0)


def await_comparisons(epoch, logs=None):
    """Waits for those that an epoch before has begun, beside training."""
    for each in equal_start._comparisons:
        each.result.join(60)


def test_weights_broadcast_after_the_first_step(
    points, rank, several_ranks, new_process
):
    model = started(rank)
    by_hand(model, points)
    keras_hvd.broadcast_variables(model.variables, root_rank=0)
    assert at_exit() == []


def test_equal_weights_at_the_start(points, of_rank, several_ranks, new_process):
    fit(started(0), of_rank)
    assert at_exit() == []


def test_local_weights_at_the_start(points, rank, several_ranks, new_process):
    model = started(rank)
    for weight in model.trainable_weights:
        model.optimizer.register_local_var(weight)
    fit(model, points)
    assert at_exit() == []


# --- functions of the user's own ---------------------------------------------------


def loop_over(model, optimizer) -> Callable:
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    def loop(points):
        for begin in range(0, len(points[0]), 4):
            step(*(rows[begin : begin + 4] for rows in points))

    return loop


LOOPS = {
    "plain": plain,
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(plain()),
}


@pytest.mark.parametrize("how", LOOPS)
def test_a_loop_that_was_traced_before_its_optimizer_reduced(
    how, alone, of_rank, several_ranks
):
    optimizer = LOOPS[how]()
    model = network()
    start = model.get_weights()
    loop = loop_over(model, optimizer)
    loop(of_rank)
    keras_hvd.DistributedOptimizer(optimizer)
    with pytest.raises(tf.errors.OpError, match="was distributed, or got other local"):
        loop(of_rank)
    # Others, and a new trace, are right.
    model.set_weights(start)
    for each in optimizer.variables:
        if "momentum" in each.path:
            each.assign(tf.zeros_like(each))
    loop_over(model, optimizer)(of_rank)
    for weight, wanted in zip(model.get_weights(), alone(1), strict=True):
        np.testing.assert_allclose(weight, wanted, atol=1e-6)


def test_a_loop_that_was_traced_before_a_variable_was_local(of_rank, several_ranks):
    model = network()
    optimizer = keras_hvd.DistributedOptimizer(plain())
    loop = loop_over(model, optimizer)
    loop(of_rank)
    optimizer.register_local_var(model.layers[0].kernel)
    with pytest.raises(tf.errors.FailedPreconditionError, match="optimizer 'sgd"):
        loop(of_rank)
    loop_over(model, optimizer)(of_rank)
    kernels = keras_hvd.allgather_object(model.layers[0].kernel.numpy())
    assert np.abs(kernels[0] - kernels[1]).max() > 0
