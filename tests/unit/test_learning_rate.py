"""LearningRateSchedule and LearningRateWarmup, as far as one process shows them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.callbacks import LearningRateSchedule, LearningRateWarmup

X, Y = np.ones((8, 3), "float32"), np.zeros((8, 2), "float32")


@pytest.fixture(autouse=True)
def job():
    keras_hvd.init()
    keras.utils.clear_session()


class Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(round(float(self.model.optimizer.learning_rate), 6))


def make_model(optimizer, **compiled) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras_hvd.DistributedOptimizer(optimizer), "mse", **compiled)
    return model


def rates_of(model, *callbacks, epochs=3, **fit) -> list[float]:
    seen = Rates()
    data = fit.pop("data", None)
    arguments = {"x": data} if data is not None else {"x": X, "y": Y, "batch_size": 2}
    model.fit(
        **arguments, epochs=epochs, verbose=0, callbacks=[*callbacks, seen], **fit
    )
    return seen.rates


def test_staircase():
    schedule = LearningRateSchedule(0.8, lambda epoch: 0.5**epoch)
    rates = rates_of(make_model(keras.optimizers.SGD(0.8)), schedule)
    assert rates == [0.8] * 4 + [0.4] * 4 + [0.2] * 4


def test_smooth():
    schedule = LearningRateSchedule(0.8, lambda epoch: 1 - epoch / 4, staircase=False)
    rates = rates_of(make_model(keras.optimizers.SGD(0.8)), schedule, epochs=2)
    assert rates == [0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45]


def test_logs_have_the_rate_that_an_epoch_was_trained_with():
    """In either order of the callbacks: a plateau reduces it for the next epoch."""
    plateau = keras.callbacks.ReduceLROnPlateau(
        "loss", patience=1, factor=0.1, min_delta=9.0
    )
    never = LearningRateSchedule(0.8, 1, start_epoch=9)
    for callbacks in [plateau, never], [never, plateau]:
        model = make_model(keras.optimizers.SGD(0.8))
        rates = rates_of(model, *callbacks)
        logged = model.history.history["learning_rate"]
        np.testing.assert_allclose(logged, rates[::4], rtol=1e-6)
        assert rates[0] > rates[-1]


def test_range_of_epochs():
    schedule = LearningRateSchedule(0.8, 0.1, start_epoch=1, end_epoch=2)
    rates = rates_of(make_model(keras.optimizers.SGD(0.5)), schedule)
    assert rates == [0.5] * 4 + [0.08] * 8


def test_steps_per_execution():
    schedule = LearningRateSchedule(0.8, lambda epoch: 1 - epoch / 4, staircase=False)
    model = make_model(keras.optimizers.SGD(0.8), steps_per_execution=2)
    assert rates_of(model, schedule, epochs=1) == [0.8, 0.7]


def test_mixed_precision_sets_the_inner_rate():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.8))
    schedule = LearningRateSchedule(0.8, lambda epoch: 0.5**epoch)
    rates = rates_of(make_model(optimizer), schedule, epochs=2)
    assert rates == [0.8] * 4 + [0.4] * 4


def test_number_of_steps_that_keras_does_not_know():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)
    data = data.filter(lambda x, y: True)
    smooth = {"multiplier": lambda epoch: 1 - epoch / 4, "staircase": False}
    model = make_model(keras.optimizers.SGD(0.8))
    with pytest.raises(ValueError, match="LearningRateSchedule needs steps_per_epoch"):
        rates_of(model, LearningRateSchedule(0.8, **smooth), data=data)
    schedule = LearningRateSchedule(0.8, **smooth, steps_per_epoch=4)
    assert rates_of(model, schedule, epochs=1, data=data) == [0.8, 0.75, 0.7, 0.65]


def test_warmup_on_one_rank_changes_nothing():
    rates = rates_of(make_model(keras.optimizers.SGD(0.8)), LearningRateWarmup(0.8))
    assert rates == [0.8] * 12


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (lambda: keras.optimizers.SGD(0.8, momentum=0.9), "momentums"),
        (lambda: keras.optimizers.RMSprop(0.8, momentum=0.9), "_momentums"),
    ],
)
def test_momentum_correction(optimizer, slots, correction):
    """Momentum is of past updates, each made at the rate of then."""
    model = make_model(optimizer())
    model.fit(X, Y, verbose=0)
    before = [slot.numpy() for slot in getattr(model.optimizer, slots)]
    schedule = LearningRateSchedule(0.8, 0.25, momentum_correction=correction)
    schedule.set_model(model)
    schedule.on_epoch_begin(1)
    factor = 0.25 if correction else 1.0
    for slot, value in zip(getattr(model.optimizer, slots), before, strict=True):
        np.testing.assert_allclose(slot, factor * value, rtol=1e-6)


def test_momentum_stays_after_a_rate_of_zero():
    """No factor leads from it to another one."""
    model = make_model(keras.optimizers.SGD(0.8, momentum=0.9))
    model.fit(X, Y, verbose=0)
    schedule = LearningRateSchedule(0.8, lambda epoch: epoch, momentum_correction=False)
    schedule.set_model(model)
    schedule.on_epoch_begin(0)
    assert model.optimizer.learning_rate == 0
    before = [slot.numpy() for slot in model.optimizer.momentums]
    schedule.momentum_correction = True
    schedule.on_epoch_begin(1)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.8)
    for slot, value in zip(model.optimizer.momentums, before, strict=True):
        np.testing.assert_array_equal(slot, value)


def test_averages_of_gradients_are_not_corrected():
    model = make_model(keras.optimizers.Adam(0.8))
    model.fit(X, Y, verbose=0)
    before = [variable.numpy() for variable in model.optimizer.variables]
    schedule = LearningRateSchedule(0.8, 0.25)
    schedule.set_model(model)
    schedule.on_epoch_begin(1)
    after = [variable.numpy() for variable in model.optimizer.variables]
    changed = [i for i, (a, b) in enumerate(zip(before, after)) if not np.all(a == b)]
    assert [model.optimizer.variables[i].name for i in changed] == ["learning_rate"]


@pytest.mark.parametrize(
    "rate",
    [keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5), lambda: 0.1],
    ids=["schedule", "function"],
)
def test_rate_that_cannot_be_set(rate):
    model = make_model(keras.optimizers.SGD(rate))
    with pytest.raises(TypeError, match="LearningRateWarmup cannot set.*'sgd'"):
        rates_of(model, LearningRateWarmup(0.1))


def test_several_rates():
    inner = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    model = make_model(keras.optimizers.MultiOptimizer(inner))
    with pytest.raises(ValueError, match="MultiOptimizer.*warmup_schedule"):
        rates_of(model, LearningRateWarmup(0.1))


@pytest.mark.parametrize("rate", [None, "fast", [0.1]])
def test_what_is_no_rate(rate):
    """Horovod's error, of all that is none."""
    for callback in (
        lambda: LearningRateSchedule(rate, 0.1),
        lambda: LearningRateWarmup(rate),
    ):
        with pytest.raises(ValueError, match="initial_lr must be a number; got"):
            callback()


@pytest.mark.parametrize("multiplier", [None, "half"])
def test_what_is_no_multiplier(multiplier):
    with pytest.raises(ValueError, match="multiplier must be a number or a function"):
        LearningRateSchedule(0.1, multiplier)


def test_a_warmup_of_no_epochs_does_nothing():
    warmup = LearningRateWarmup(0.8, warmup_epochs=0, steps_per_epoch=4)
    rates = rates_of(make_model(keras.optimizers.SGD(0.3)), warmup, epochs=1)
    assert rates == [0.3] * 4


def test_warmup_schedule_of_a_name():
    assert keras_hvd.warmup_schedule(0.1, 3, name="mine").name == "mine"


def test_warmup_schedule_of_no_steps():
    with pytest.raises(ValueError, match="at least 1"):
        keras_hvd.warmup_schedule(0.1, warmup_steps=0)


def test_names_of_horovod():
    for name in (
        "BroadcastGlobalVariables",
        "LearningRateSchedule",
        "LearningRateWarmup",
        "MetricAverage",
    ):
        ours = getattr(keras_hvd.callbacks, name)
        assert getattr(keras_hvd.callbacks, f"{name}Callback") is ours
