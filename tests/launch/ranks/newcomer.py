"""Trains a line by elastic.fit in float64, counting traces; a rank dies and comes back.

Takes a folder and a way: "graph", "xla", "executions", of 2 steps each, or "reads", in
which the step reads the job's size. Rank 1 dies by SIGKILL in epoch 2, and epoch 5
waits until it is there again. With MISTAKE its successor has other data, and that epoch
waits until it has failed. Writes what each rank has seen.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_hvd
from keras_hvd.world.renewal import of

EPOCHS, STEPS, ROWS = 8, 4, 12

keras.config.set_floatx("float64")
folder, way = Path(sys.argv[1]), sys.argv[2]
renewal = of(os.environ)
makes_mistake = "MISTAKE" in os.environ
keras_hvd.init()
rng = np.random.default_rng(7)
x, y = rng.normal(size=(STEPS * ROWS, 3)), rng.normal(size=(STEPS * ROWS, 1))
traces, sizes, made, epochs = [], [], [], []


class Line(keras.Sequential):
    def train_step(self, data):
        traces.append("train")
        if way == "reads":
            traces.append(keras_hvd.size())
        return super().train_step(data)

    def test_step(self, data):
        traces.append("test")
        return super().test_step(data)


keras.utils.set_random_seed(keras_hvd.rank())
model = Line([keras.Input((3,)), keras.layers.Dropout(0), keras.layers.Dense(1)])
model.compile(
    keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.1, use_ema=True)),
    "mse",
    metrics=["mae"],
    jit_compile=way == "xla",
    steps_per_execution=2 if way == "executions" else 1,
)


def make_data() -> tf.data.Dataset:
    """Each step has the same rows, whatever the number of ranks is."""
    rank, size = keras_hvd.rank(), keras_hvd.size()
    sizes.append(size)
    made.append([random.random(), np.random.random()])
    steps = np.arange(STEPS * ROWS).reshape(STEPS, ROWS)
    mine = steps[:, rank::size].reshape(-1)
    given = x[mine][:, :2] if makes_mistake and renewal.is_new else x[mine]
    return tf.data.Dataset.from_tensor_slices((given, y[mine])).batch(ROWS // size)


def is_over() -> bool:
    if makes_mistake:
        return keras_hvd.broadcast_object((folder / "failed").exists())
    return keras_hvd.size() == 3


def note_failure(*error) -> None:
    sys.__excepthook__(*error)
    # Now: the others end soon, and then it is killed.
    (folder / "failed").touch()


class Told(keras.callbacks.Callback):
    """Sees what the model has, where only steps of the job may have changed it."""

    def __init__(self):
        super().__init__()
        self.hooks = []

    def on_train_begin(self, logs=None):
        self.hooks.append("begin")

    def on_epoch_begin(self, epoch, logs=None):
        epochs.append([epoch, keras_hvd.size(), int(self.model.optimizer.iterations)])
        if epoch == 5:
            (folder / "others wait").touch()
        while epoch == 5 and not is_over():
            keras_hvd.elastic.ObjectState().check_host_updates()

    def on_train_batch_begin(self, batch, logs=None):
        if renewal.number == 1 and not renewal.is_new and epochs[-1][0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)


if renewal.is_new:
    sys.excepthook = note_failure
    # It would come sooner if the others were slow.
    while not (folder / "others wait").exists():
        time.sleep(0.01)
told = Told()
keras_hvd.elastic.fit(
    model,
    make_data,
    make_validation_data=lambda: (x[:6], y[:6]),
    epochs=EPOCHS,
    verbose=0,
    callbacks=[
        keras_hvd.callbacks.BroadcastGlobalVariables(0),
        keras_hvd.callbacks.MetricAverage(),
        keras_hvd.callbacks.BackupAndRestore(str(folder / "backup")),
        told,
    ],
)
seen = {
    "rank": keras_hvd.rank(),
    "is new": renewal.is_new,
    "traces": traces,
    "sizes": sizes,
    "drawn": made,
    "epochs": epochs,
    "hooks": told.hooks,
    "weights": [each.numpy().tolist() for each in model.weights],
}
(folder / f"{os.getpid()}.json").write_text(json.dumps(seen))
