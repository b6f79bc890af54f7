"""A step that is taken back leaves a model and random numbers as they were."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.elastic import rehearsal

ROWS = np.ones((5, 1)), np.zeros(5)


class Counted(keras.Sequential):
    """Counts traces, and draws without a generator of its own."""

    traces = 0

    def train_step(self, data):
        Counted.traces += 1
        keras.random.uniform([])
        return super().train_step(data)

    def test_step(self, data):
        Counted.traces += 1
        return super().test_step(data)


@pytest.fixture
def model():
    keras_hvd.init()
    Counted.traces = 0
    layers = [keras.Input((1,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = Counted(layers)
    optimizer = keras.optimizers.Adam(0.1, use_ema=True)
    model.compile(keras_hvd.DistributedOptimizer(optimizer), "mse", metrics=["mae"])
    return model


def everything(model):
    generator = keras.src.random.seed_generator.global_seed_generator().state
    variables = [*model.variables, *model.optimizer.variables, generator]
    return [each.numpy().tolist() for each in variables]


def test_it_leaves_nothing_and_fit_traces_nothing_more(model):
    state = keras_hvd.elastic.KerasState(model)
    before = everything(model)
    random.seed(1)
    np.random.seed(1)
    given = {"x": ROWS[0], "y": ROWS[1], "batch_size": 2, "validation_data": ROWS}

    def draw_and_give():
        random.random()
        np.random.random()
        return given

    rehearsal.rehearse(model, state.restore, draw_and_give)
    assert everything(model) == before
    drawn = random.random(), np.random.random()
    assert drawn == (random.Random(1).random(), np.random.RandomState(1).random())
    traces = Counted.traces
    model.fit(**given, epochs=2, verbose=0)
    assert Counted.traces == traces > 0


def test_a_generator_keeps_its_batches(model):
    batches = iter([ROWS] * 3)
    rehearsal.rehearse(model, lambda: None, lambda: {"x": batches})
    assert Counted.traces == 0
    assert len([*batches]) == 3


def test_a_step_that_fails_is_taken_back_too(model):
    undone = []
    wrong = {"x": np.ones((2, 3)), "y": np.ones(2)}
    with pytest.raises(ValueError, match="expected axis -1"):
        rehearsal.rehearse(model, lambda: undone.append(1), lambda: wrong)
    assert undone == [1]


def test_only_one_step_is_made(model):
    """The data may be endless."""
    endless = tf.data.Dataset.from_tensors(ROWS).repeat()
    given = {"x": endless, "steps_per_epoch": 50}
    undone = []
    rehearsal.rehearse(
        model, lambda: undone.append(int(model.optimizer.iterations)), lambda: given
    )
    assert undone == [1]


def test_a_name_taken_before_is_given_up_with_its_trace(model):
    """As of a model that was trained after another one in the first job alone."""
    optimizer = model.optimizer
    rehearsal.take_place(optimizer, 0, 3)
    model.make_train_function()
    rehearsal.name_alike(model)
    assert model.train_function is None
    assert rehearsal.place_in_program(optimizer, 0) == 0
    model.make_train_function()
    rehearsal.name_alike(model)
    assert model.train_function is not None
