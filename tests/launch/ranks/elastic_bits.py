"""Trains images in float32, and keeps all that the training has at each commit.

Takes a folder, a way ("graph", "xla" or "fit"), and either a rank, as it was started,
that dies by SIGKILL in step 3, or the file of a commit, from which all go on. But for
XLA that one dies within the step, once its last layer's gradients are reduced.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_hvd
from keras_hvd.job import native
from keras_hvd.world.renewal import of

STEPS, ROWS, LOST_AT = 8, 24, 3
STEPS_PER_EPOCH = 2

folder, way, word = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
for setting in "intra", "inter":
    # The order of TensorFlow's own sums depends on its threads.
    of_threads = getattr(tf.config.threading, f"set_{setting}_op_parallelism_threads")
    of_threads(1 if setting == "intra" else 4)
keras_hvd.init()
started_as = of(os.environ).number
rng = np.random.default_rng(7)
x = rng.normal(size=(STEPS, ROWS, 12, 12, 3)).astype("float32")
y = rng.normal(size=(STEPS, ROWS, 1)).astype("float32")
dies = word == str(started_as)
reduced_before = 0


def reduced() -> int:
    counters = native.Counters()
    counters.struct_size = ctypes.sizeof(counters)
    native.engine().khvd_get_counters(ctypes.byref(counters))
    return counters.tensors


def die_if_told(gradient):
    if dies and int(optimizer.iterations) == LOST_AT:
        while reduced() == reduced_before:
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGKILL)
    return gradient


@tf.custom_gradient
def passed_on(outputs):
    def backwards(gradient):
        if way == "xla":
            return gradient
        told = tf.numpy_function(die_if_told, [gradient], gradient.dtype)
        return tf.ensure_shape(told, gradient.shape)

    return tf.identity(outputs), backwards


class PassedOn(keras.layers.Layer):
    """Is passed backwards when the gradients of all layers after it are there."""

    def call(self, inputs):
        return passed_on(inputs)


# Layers draw their seeds as they are made.
keras.utils.set_random_seed(started_as)
model = keras.Sequential(
    [
        keras.Input(x.shape[2:]),
        keras.layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        PassedOn(),
        # Of more than a bucket.
        keras.layers.Dense(2048, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1),
    ]
)
optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
model.compile(optimizer, "mse", jit_compile=False)
state = keras_hvd.elastic.KerasState(model, step=0)


# One trace for each shape: where TensorFlow does not know a batch's size, it may choose
# kernels that round otherwise.
@tf.function(jit_compile=way == "xla")
def update(rows, wanted):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(rows, training=True) - wanted))
    variables = model.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)


def keep(name):
    values = {str(n): each.numpy() for n, each in enumerate(state.variables)}
    np.savez(folder / f"{name}.npz", **values)


if Path(word).is_file():
    with np.load(word) as committed:
        for number, variable in enumerate(state.variables):
            variable.assign(committed[str(number)])
    state.step = int(optimizer.iterations)
    state.save()
began = []


def begin_step():
    global reduced_before
    if dies and way == "xla" and int(optimizer.iterations) == LOST_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    reduced_before = reduced()


@keras_hvd.elastic.run
def train(state):
    rank, size = keras_hvd.rank(), keras_hvd.size()
    began.append([size, state.step])
    while state.step < STEPS:
        begin_step()
        update(x[state.step][rank::size], y[state.step][rank::size])
        state.step += 1
        state.commit()
        keep(f"{started_as}-{state.step}")


def make_data():
    """The same two steps in each epoch."""
    rank, size = keras_hvd.rank(), keras_hvd.size()
    began.append([size, int(optimizer.iterations)])
    mine = [each[:STEPS_PER_EPOCH, rank::size] for each in (x, y)]
    return tf.data.Dataset.from_tensor_slices(tuple(mine)).unbatch().batch(ROWS // size)


class Kept(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        keep(f"{started_as}-{int(optimizer.iterations)}")

    def on_train_batch_begin(self, batch, logs=None):
        begin_step()


if way == "fit":
    keras_hvd.elastic.fit(
        model,
        make_data,
        epochs=STEPS // STEPS_PER_EPOCH,
        initial_epoch=state.step // STEPS_PER_EPOCH,
        callbacks=[Kept()],
        verbose=0,
    )
else:
    train(state)
keep(f"end-{keras_hvd.rank()}")
(folder / f"{keras_hvd.rank()}.json").write_text(json.dumps(began))
