"""A line, trained in float64 on shares of the same global batches, for elastic.py."""

import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_hvd
from keras_hvd.world.renewal import of

STEPS, ROWS = 20, 12

keras.config.set_floatx("float64")
rng = np.random.default_rng(7)
x, y = rng.normal(size=(STEPS * ROWS, 3)), rng.normal(size=(STEPS * ROWS, 1))
keras.utils.set_random_seed(keras_hvd.rank())
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
state = keras_hvd.elastic.KerasState(model, optimizer, step=0)
traces = []


@tf.function(reduce_retracing=True)
def update(rows, wanted):
    traces.append(1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(rows) - wanted))
    variables = model.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)


def step(number: int) -> None:
    rank, size = keras_hvd.rank(), keras_hvd.size()
    batch = slice(number * ROWS, (number + 1) * ROWS)
    update(x[batch][rank::size], y[batch][rank::size])


if of(os.environ).is_new:
    # It traces its step before it joins.
    step(0)
    state.restore()


def seen() -> dict:
    """Also saves the model."""
    if keras_hvd.rank() == 0:
        model.save(Path(sys.argv[1]) / "model.keras")
    weights = [each.numpy().tolist() for each in model.weights]
    return {"traces": len(traces), "weights": weights}
