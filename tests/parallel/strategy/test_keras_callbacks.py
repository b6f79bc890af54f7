"""Keras' callbacks under a strategy: decisions are the same, files written once."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd

layers = keras.layers


def compiled(optimizer: Any = "sgd") -> keras.Model:
    model = keras.Sequential(
        [keras.Input((14, 14, 1)), layers.Flatten(), layers.Dense(10)], name="model"
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def test_deciding(both_ways, require_equal, digits):
    """EarlyStopping and ReduceLROnPlateau end where they would on one process."""

    def run(x, y):
        model = compiled(keras.optimizers.SGD(3.0))
        history = model.fit(
            x[:100],
            y[:100],
            batch_size=33,
            epochs=8,
            validation_data=(x[100:150], y[100:150]),
            verbose=0,
            callbacks=[
                keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=0),
                keras.callbacks.EarlyStopping(
                    patience=1, min_delta=0.1, restore_best_weights=True
                ),
            ],
        )
        return {"logs": history.history, "weights": model.get_weights()}

    alone, here = both_ways(run, "deciding", *digits)
    require_equal(alone, here, 1e-4)
    assert 1 < len(here["logs"]["loss"]) < 8


class Board(keras.callbacks.TensorBoard):
    """Writes when it is given the model, and never after; needs no tensorboard."""


for hook in [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]:
    setattr(Board, hook, getattr(keras.callbacks.Callback, hook))


def test_writing(strategy, digits, shared_path, rank, capfd, equal_on_all_ranks):
    """Only rank 0 writes, and prints; an interrupted training goes on where it was."""
    x, y = digits
    epochs = []

    def fit(until):
        keras.utils.clear_session()
        with strategy.scope():
            model = compiled()
        count = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: epochs.append(epoch)
        )
        mine = shared_path / f"rank{rank}"
        stop = keras.callbacks.LambdaCallback()
        if until == 1:
            # As if killed after the first epoch: the backup is kept.
            stop.on_epoch_end = lambda epoch, logs=None: _interrupt(epoch)
        callbacks = [
            keras.callbacks.ModelCheckpoint(
                mine / "best.keras", save_best_only=True, monitor="loss"
            ),
            keras.callbacks.CSVLogger(mine / "log.csv"),
            Board(mine / "board"),
            keras.callbacks.BackupAndRestore(mine / "backup"),
            count,
            stop,
        ]
        model.fit(x[:60], y[:60], batch_size=20, epochs=2, callbacks=callbacks)
        return model

    (shared_path / f"rank{rank}").mkdir()
    with pytest.raises(_InterruptedError):
        fit(1)
    model = fit(2)
    assert epochs == [0, 1]
    assert equal_on_all_ranks(model.get_weights())
    written = {each.name for each in (shared_path / f"rank{rank}").iterdir()}
    shown = capfd.readouterr().out
    if rank == 0:
        assert {"best.keras", "log.csv", "board"} <= written
        assert len((shared_path / "rank0" / "log.csv").read_text().splitlines()) == 2
        assert "Epoch 2/2" in shown
    else:
        assert not written
        assert "Epoch" not in shown


class _InterruptedError(Exception):
    pass


def _interrupt(epoch):
    raise _InterruptedError(epoch)


def test_stopping_on_one_rank(strategy, digits, rank, size):
    """A rank that wants to stop stops all."""
    x, y = digits
    steps = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)
            if rank == size - 1 and batch == 1:
                self.model.stop_training = True

    with strategy.scope():
        model = compiled()
    model.fit(x[:80], y[:80], batch_size=16, epochs=3, verbose=0, callbacks=[Stop()])
    assert steps == [0, 1]


def test_ours_do_no_harm(both_ways, require_equal, digits):
    """The callbacks that a script without a strategy needs change nothing."""

    def run(x, y):
        model = compiled(keras.optimizers.SGD(0.1, momentum=0.9))
        callbacks = [
            keras_hvd.callbacks.BroadcastGlobalVariables(0),
            keras_hvd.callbacks.MetricAverage(),
        ]
        history = model.fit(
            x[:70],
            y[:70],
            batch_size=32,
            validation_data=(x[70:99], y[70:99]),
            verbose=0,
            callbacks=callbacks if model._distribute_strategy else None,
        )
        return {"logs": history.history, "weights": model.get_weights()}

    require_equal(*both_ways(run, "ours", *digits))


def test_callback_list(both_ways, require_equal, digits):
    """A list that the user made is coordinated as well."""

    def run(x, y):
        model = compiled()
        callbacks = keras.callbacks.CallbackList(
            [keras.callbacks.EarlyStopping("loss", min_delta=9.0, patience=1)],
            add_history=True,
            model=model,
            epochs=5,
            steps=3,
        )
        history = model.fit(
            x[:50], y[:50], batch_size=20, epochs=5, verbose=0, callbacks=callbacks
        )
        return {"logs": history.history}

    alone, here = both_ways(run, "list", *digits)
    require_equal(alone, here)


def test_statistics_before_validation(strategy, digits, equal_on_all_ranks):
    """Moving statistics are averaged when validation, and saving, see them."""
    x, y = digits
    seen = []

    class See(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            seen.append(self.model.layers[1].moving_mean.numpy())

    with strategy.scope():
        model = keras.Sequential(
            [layers.Flatten(), layers.BatchNormalization(), layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    data = x[:40], y[:40]
    model.fit(*data, batch_size=15, verbose=0, validation_data=data, callbacks=[See()])
    assert equal_on_all_ranks([*seen, *model.get_weights()])
    assert np.abs(seen[0]).max() > 0


def test_silence(strategy, digits, capfd, rank):
    """Progress is shown once by evaluate and predict, too."""
    x, y = digits
    with strategy.scope():
        model = compiled()
    model.evaluate(x[:40], y[:40])
    model.predict(x[:40])
    assert bool(capfd.readouterr().out) == (rank == 0)


def stopping_on_rank_0(rank) -> list[keras.callbacks.Callback]:
    if rank != 0:
        return []
    return [keras.callbacks.EarlyStopping("val_loss", restore_best_weights=True)]


@pytest.mark.parametrize("made", [False, True], ids=["callbacks", "CallbackList"])
def test_best_weights_of_one_rank(made, strategy, rank, equal_on_all_ranks):
    """Weights that a callback of rank 0 restores are restored on all ranks."""
    with strategy.scope():
        line = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), line])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    callbacks: Any = stopping_on_rank_0(rank)
    if made:
        callbacks = keras.callbacks.CallbackList(
            callbacks, add_history=True, model=model, epochs=9, steps=2
        )
    x = np.ones((8, 1), "float32")
    # In an epoch of two steps the weight goes 19 % of the way to 10.
    model.fit(
        x,
        10 * x,
        batch_size=4,
        epochs=9,
        verbose=0,
        validation_data=(x, 2 * x),
        callbacks=callbacks,
    )
    assert equal_on_all_ranks(model.get_weights())
    np.testing.assert_allclose(model.get_weights()[0], [[1.9]], rtol=1e-5)


class Notes(layers.Layer):
    """Keeps sums of its rank's rows, one of them equal on all ranks."""

    def build(self, shape):
        self.plain, self.mean = (
            self.add_weight(
                name=name,
                shape=(),
                initializer="zeros",
                trainable=False,
                aggregation=aggregation,
            )
            for name, aggregation in (("plain", "none"), ("mean", "mean"))
        )
        self.own = keras.Variable(0.0, trainable=False, synchronization="on_read")

    def call(self, inputs, training=False):
        if training:
            for each in self.plain, self.mean, self.own:
                each.assign(tf.reduce_sum(inputs))
        return inputs


def test_weights_that_differ_are_named_once(strategy):
    with strategy.scope():
        notes = Notes(name="notes")
        model = keras.Sequential([keras.Input((1,)), notes, layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.arange(8, dtype="float32")[:, None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, x, batch_size=8, epochs=2, verbose=0)
    texts = [str(each.message) for each in caught]
    [said] = [each for each in texts if "differ between ranks" in each]
    others = ", ".join(map(str, range(1, keras_hvd.size())))
    assert f"notes/plain (rank {others} not as rank 0)" in said
    assert "mean (" not in said and "own (" not in said
    assert 'aggregation="mean"' in said and "on_read" in said


def test_subclass_of_a_writer(strategy, rank, tmp_path):
    """It runs on all ranks, and may predict; rank 0 writes."""

    class Logger(keras.callbacks.CSVLogger):
        def on_epoch_end(self, epoch, logs=None):
            off = np.abs(self.model.predict(x, verbose=0) - x).mean()
            super().on_epoch_end(epoch, {**logs, "off": off})
            logs["off"] = float(off)

    with strategy.scope():
        line = layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), line])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.ones((6, 1), "float32")
    logger = Logger(tmp_path / "log.csv")
    history = model.fit(x, x, batch_size=4, verbose=0, callbacks=[logger])
    assert history.history["off"] == [1.0]
    assert (tmp_path / "log.csv").exists() == (rank == 0)
