"""Which traces a later job can go on with: those that hold nothing of their own job."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.backends.tensorflow import random_numbers
from keras_hvd.job import later_jobs
from keras_hvd.optimizer import retracing

ROWS = np.ones((4, 2)), np.zeros(4)


@pytest.fixture(autouse=True)
def joined(monkeypatch):
    keras_hvd.init()
    monkeypatch.setenv(later_jobs.VARIABLE, "{}")


class Own(keras.Sequential):
    """Does something in its step."""

    does = staticmethod(lambda: None)

    def train_step(self, data):
        self.does()
        return super().train_step(data)


def trained(does, **arguments):
    keras.utils.set_random_seed(7)
    model = Own([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    Own.does = staticmethod(does)
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam())
    model.compile(optimizer, "mse", **arguments)
    model.fit(*ROWS, verbose=0, callbacks=[keras_hvd.callbacks.MetricAverage()])
    return model


def in_branch():
    tf.cond(tf.constant(1.0) > 0, lambda: tf.random.uniform([]), lambda: 0.0)


@pytest.mark.parametrize(
    "does, held",
    [
        (lambda: None, set()),
        (keras_hvd.size, {"size"}),
        (keras_hvd.local_rank, {"local_rank"}),
        (keras_hvd.global_process_set.rank, {"rank"}),
        (keras_hvd.size_op, set()),
        # Its seed is that of the rank.
        (lambda: tf.random.uniform([]), {"rank"}),
        (in_branch, {"rank"}),
        (lambda: keras.random.uniform([]), set()),
    ],
)
def test_what_a_step_holds(does, held):
    assert trained(does).train_function._keras_hvd_held == held


def test_what_xla_compiles_for_a_size_is_held():
    model = trained(lambda: keras_hvd.size_op(), jit_compile=True)
    assert model.train_function._keras_hvd_held == {"size"}
    model = trained(lambda: None, jit_compile=True)
    assert model.train_function._keras_hvd_held == set()


@pytest.mark.parametrize(
    "does, keeps, is_kept",
    [
        (lambda: None, True, True),
        (keras_hvd.size, True, False),
        # A reset callback may have changed it.
        (lambda: None, False, False),
    ],
)
def test_a_step_is_kept_in_a_job_of_another_size(monkeypatch, does, keeps, is_kept):
    model = trained(does)
    if keeps:
        retracing.keep_traces(model)
    here = retracing._place()
    monkeypatch.setattr(retracing, "_place", lambda: {**here, "size": 5})
    retracing.trace_anew_in_another_job(model)
    assert (model.train_function is not None) == is_kept


def test_a_step_of_process_sets_is_not_kept(monkeypatch):
    model = trained(lambda: None)
    retracing.keep_traces(model)
    here = retracing._place()
    monkeypatch.setattr(retracing, "_place", lambda: {**here, "sets": "another job's"})
    retracing.trace_anew_in_another_job(model)
    assert model.train_function is None


def test_seeds_are_those_of_the_rank():
    @tf.function
    def draw():
        with random_numbers.of_rank(3):
            return tf.random.uniform([]).op.get_attr("seed")

    tf.random.set_seed(4)
    assert int(draw()) == 7
