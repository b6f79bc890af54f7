"""The traces of `stop_training` in the code of callbacks."""

import functools

import keras
import pytest

from keras_hvd.callbacks.stopping import When, needs


class Plain(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print(batch)


class InAMethod(Plain):
    def stop(self):
        self.model.stop_training = True


class Inherits(InAMethod):
    pass


class AsText(Plain):
    def stop(self):
        setattr(self.model, "stop_training", True)  # noqa: B010


class InAnInnerFunction(Plain):
    def stop(self):
        return lambda model: setattr(model, "stop_training", True)


class AsAProperty(Plain):
    @property
    def stops(self):
        return self.model.stop_training


class Mixin:
    def stop(self):
        self.model.stop_training = True


class Mixed(Plain, Mixin):
    pass


def stop(model):
    model.stop_training = True


class ByName(Plain):
    def on_train_batch_end(self, batch, logs=None):
        stop(self.model)


class Callable:
    def __call__(self, batch, logs):
        stop(self)


class Holds(Plain):
    def __init__(self, *held):
        super().__init__()
        self.held = held


def closure():
    inner = stop
    return lambda batch, logs: inner(batch)


def of_batches(function):
    return keras.callbacks.LambdaCallback(on_train_batch_end=function)


def mentioned_in_text(batch, logs):
    """Does not touch stop_training."""


@pytest.mark.parametrize(
    "callback",
    [
        InAMethod(),
        Inherits(),
        AsText(),
        InAnInnerFunction(),
        AsAProperty(),
        Mixed(),
        ByName(),
        Holds(stop),
        Holds(functools.partial(stop, None)),
        Holds(InAMethod()),
        of_batches(lambda batch, logs: stop(batch)),
        of_batches(closure()),
        of_batches(Callable()),
        of_batches(functools.partial(stop)),
        of_batches(InAMethod().stop),
        of_batches(print),
        keras.callbacks.TerminateOnNaN(),
    ],
)
def test_what_may_stop_within_an_epoch(callback):
    assert needs([Plain(), callback]) is When.AT_ONCE


@pytest.mark.parametrize(
    "callback",
    [Plain(), Holds(Plain()), of_batches(mentioned_in_text)],
)
def test_what_does_not_show_it(callback):
    assert needs([callback]) is When.A_STEP_LATER


def test_callbacks_that_hold_each_other():
    one, other = Holds(), InAMethod()
    one.held, other.held = other, one
    assert needs([one]) is When.AT_ONCE


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.EarlyStopping(),
        keras.callbacks.ModelCheckpoint("model.keras", save_freq=2),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: stop(epoch)),
    ],
)
def test_what_comes_between_epochs(callback):
    assert needs([callback]) is When.NEVER
    assert needs([]) is When.NEVER
