"""What elastic.fit takes, and how callbacks go on after a failure."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd import elastic
from keras_hvd.exceptions import RankFailedError

ROWS = np.ones((8, 1)), np.zeros((8, 1))


@pytest.fixture
def model():
    keras_hvd.init()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    return model


class Counts(keras.callbacks.Callback):
    """Has attributes of all kinds; epoch 2 fails the first time."""

    def __init__(self, fails=False):
        super().__init__()
        self.fails = fails
        self.began = []
        self.epochs, self.by_name, self.best = [], {"of": [0]}, np.zeros(2)
        self.compare = np.less
        self.object = object()
        self.unknown = lambda: 1

    def on_train_begin(self, logs=None):
        self.began.append(1)

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)
        self.by_name["of"].append(epoch)
        self.best += 1
        if epoch == 2 and self.fails:
            CallCount.failures += 1
            if CallCount.failures == 1:
                raise RankFailedError("rank 1 has left the job")


class CallCount:
    failures = 0


@pytest.fixture(autouse=True)
def no_failures(monkeypatch):
    monkeypatch.setattr(CallCount, "failures", 0)


def test_callbacks_go_back_to_the_begin_of_the_epoch(model, job):
    counts = Counts(fails=True)
    kept = counts.object, counts.unknown
    history = elastic.fit(model, lambda: ROWS, epochs=4, verbose=0, callbacks=[counts])
    assert job.renewals == 1
    assert CallCount.failures == 2
    assert history.epoch == counts.epochs == [0, 1, 2, 3]
    assert len(history.history["loss"]) == 4
    assert counts.by_name == {"of": [0, 0, 1, 2, 3]}
    assert counts.best.tolist() == [4, 4]
    assert counts.began == [1]
    assert (counts.object, counts.unknown) == kept
    # It can begin again.
    elastic.fit(model, lambda: ROWS, verbose=0, callbacks=[counts])
    assert counts.began == [1, 1]


def test_a_callback_of_functions_has_them_afterwards(model, job):
    began = []
    callback = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: began.append(1)
    )
    own = callback.on_train_begin
    counts = Counts(fails=True)
    elastic.fit(
        model, lambda: ROWS, epochs=3, verbose=0, callbacks=[callback, [counts]]
    )
    assert began == [1]
    assert callback.on_train_begin is own


@pytest.mark.parametrize(
    "data",
    [ROWS, (*ROWS, np.ones(8)), tf.data.Dataset.from_tensors(ROWS)],
    ids=["rows", "weights", "dataset"],
)
def test_data_that_it_takes(model, data):
    history = elastic.fit(
        model, lambda: data, make_validation_data=lambda: ROWS, verbose=0
    )
    assert len(history.history["val_loss"]) == 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"make_data": ROWS}, "make_data must be a function .* got tuple"),
        ({"make_validation_data": ROWS}, "make_validation_data must be a function"),
        ({"x": ROWS[0]}, "takes no x: return it from make_data"),
        ({"validation_data": ROWS}, "return it from make_validation_data"),
    ],
)
def test_data_that_it_refuses(model, arguments, said):
    with pytest.raises(TypeError, match=said):
        elastic.fit(**{"model": model, "make_data": lambda: ROWS, **arguments})


def test_data_of_four_parts_are_refused(model):
    with pytest.raises(ValueError, match="got a tuple of 4"):
        elastic.fit(model, lambda: (*ROWS, *ROWS))


def test_a_model_without_variables_is_refused():
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="has no variables yet"):
        elastic.fit(model, lambda: ROWS)
