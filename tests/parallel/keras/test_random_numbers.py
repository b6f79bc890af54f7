"""Ranks that set one seed draw different numbers in steps, and the same outside."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.backends.tensorflow import random_numbers

DRAWS: dict[str, Callable[[], Any]] = {
    "tf.random": lambda: tf.random.normal([2]),
    "keras.random": lambda: keras.random.normal((2,)),
    "of_a_seed": lambda: tf.random.normal([2], seed=5),
}


class Noise(keras.layers.Layer):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.drawn = self.add_weight(shape=(2,), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.drawn.assign(self.draw())
        return inputs + self.drawn


class NoiseOfGenerator(Noise):
    """Draws from a generator of TensorFlow that the layer has itself."""

    def __init__(self):
        super().__init__(lambda: self.generators[0].normal([2]))
        self.generators = [tf.random.Generator.from_seed(7)]


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        tape = keras_hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def fit_and_draw(
    way: str, draw: Callable[[], Any] | None, **compiled: Any
) -> np.ndarray:
    """The numbers that the last step of a model has drawn on this rank."""
    keras.utils.set_random_seed(42)
    is_strategy = way == "strategy"
    with keras_hvd.Strategy().scope() if is_strategy else contextlib.nullcontext():
        noise = Noise(draw) if draw else NoiseOfGenerator()
        inputs = keras.Input((2,))
        outputs = keras.layers.Dense(1)(noise(inputs))
        kind = OwnStep if way == "tape" else keras.Model
        model = kind(inputs, outputs)
        optimizer = keras.optimizers.SGD(0.1)
        if way == "optimizer":
            optimizer = keras_hvd.DistributedOptimizer(optimizer)
        model.compile(optimizer, "mse", **compiled)
    callbacks = [keras_hvd.callbacks.BroadcastGlobalVariables(0)]
    x = np.zeros((6, 2), "float32")
    model.fit(x, x[:, :1], batch_size=3, verbose=0, callbacks=callbacks)
    return np.asarray(noise.drawn)


def numbers_of_ranks(drawn: Any) -> int:
    return len({*keras_hvd.allgather_object(np.asarray(drawn).tobytes())})


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("way", ["strategy", "optimizer", "tape"])
def test_steps_draw_different_numbers(way, eagerly, draw, size, rank):
    first = fit_and_draw(way, DRAWS[draw], run_eagerly=eagerly)
    assert numbers_of_ranks(first) == size
    # The seed alone decides them.
    again = fit_and_draw(way, DRAWS[draw], run_eagerly=eagerly)
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("way", ["optimizer", "tape"])
def test_generators_of_layers_differ(way, size, rank):
    first = fit_and_draw(way, None)
    assert numbers_of_ranks(first) == size
    np.testing.assert_array_equal(fit_and_draw(way, None), first)


@pytest.mark.parametrize("way", ["strategy", "optimizer"])
def test_scripts_draw_the_same_numbers(way, rank):
    """Outside of steps ranks draw alike: they may choose their data by that."""
    fit_and_draw(way, DRAWS["tf.random"])
    order = tf.random.shuffle(tf.range(100))
    assert numbers_of_ranks(order) == 1
    shuffled = tf.data.Dataset.range(100).shuffle(100).batch(100)
    assert numbers_of_ranks(next(iter(shuffled))) == 1


@pytest.mark.needs_xla
@pytest.mark.parametrize("way", ["strategy", "optimizer"])
def test_compiled_steps(way, size, rank, recwarn):
    """Keras' numbers differ; TensorFlow's have no seed there, which is said once."""
    random_numbers._warn_once.cache_clear()
    drawn = fit_and_draw(way, DRAWS["keras.random"], jit_compile=True)
    assert numbers_of_ranks(drawn) == size
    assert not [each for each in recwarn if "no seed" in str(each.message)]
    fit_and_draw(way, DRAWS["tf.random"], jit_compile=True)
    said = [str(each.message) for each in recwarn if "no seed" in str(each.message)]
    assert len(said) == (rank == 0)
    assert all("random_normal" in each and "keras.random" in each for each in said)
