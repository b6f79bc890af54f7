"""LearningRateWarmup, LearningRateSchedule and warmup_schedule on several ranks."""

import keras
import numpy as np
import pytest

import keras_hvd
from keras_hvd.callbacks import LearningRateSchedule, LearningRateWarmup

X, Y = np.ones((12, 3), "float32"), np.zeros((12, 2), "float32")
STEPS = 4


class Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))


def rates_of(model, *callbacks, epochs=3):
    seen = Rates()
    model.fit(
        X, Y, batch_size=3, epochs=epochs, verbose=0, callbacks=[*callbacks, seen]
    )
    return seen.rates


def warmup_rates(size, epochs):
    """The rates from one process' to that of all, in equal steps, the last one full."""
    steps = epochs * STEPS
    ramp = [(1 + (step + 1) / steps * (size - 1)) / size for step in range(steps)]
    return 0.4 * np.array(ramp)


def test_warmup(size, make_linear, capsys, rank):
    model = make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.4)))
    rates = rates_of(model, LearningRateWarmup(0.4, warmup_epochs=2, verbose=1))
    np.testing.assert_allclose(rates[:8], warmup_rates(size, 2), rtol=1e-6)
    np.testing.assert_allclose(rates[8:], [0.4] * 4, rtol=1e-6)
    assert ("Epoch 2: warmup ended" in capsys.readouterr().out) == (rank == 0)


def test_warmup_then_decay(size, make_linear):
    model = make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.4)))
    rates = rates_of(
        model,
        LearningRateWarmup(0.4, warmup_epochs=1),
        LearningRateSchedule(0.4, multiplier=1.0, start_epoch=1, end_epoch=2),
        LearningRateSchedule(0.4, multiplier=0.1, start_epoch=2),
    )
    np.testing.assert_allclose(rates[:4], warmup_rates(size, 1), rtol=1e-6)
    np.testing.assert_allclose(rates[4:], [0.4] * 4 + [0.04] * 4, rtol=1e-6)


def test_warmup_schedule_is_the_warmup(size, make_linear):
    schedule = keras_hvd.warmup_schedule(0.4, warmup_steps=8)
    rates = [float(schedule(step)) for step in range(12)]
    np.testing.assert_allclose(rates[:8], warmup_rates(size, 2), rtol=1e-6)
    np.testing.assert_allclose(rates[8:], [0.4] * 4, rtol=1e-6)
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(schedule))
    make_linear(optimizer).fit(X, Y, verbose=0)


def test_plain_optimizer_is_refused(several_ranks, make_linear):
    with pytest.raises(RuntimeError, match="not distributed"):
        rates_of(make_linear(keras.optimizers.SGD(0.4)), LearningRateWarmup(0.4))
