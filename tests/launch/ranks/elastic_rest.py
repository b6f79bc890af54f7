"""Trains a line by elastic.fit in float64, with commits within epochs.

Takes a folder, the number of rows, "arrays" or "files", and then pairs of a rank, as it
was started, and the epoch and step, as in 1.5, at whose begin that one dies by SIGKILL.
If MEMBERS is set, step 6 of epoch 2 waits for so many ranks. Each step's rows are
written as soon as it has ended, and at the end what callbacks saw.
"""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf

import keras_hvd
from keras_hvd.data import from_arrays, from_files
from keras_hvd.world.renewal import of

EPOCHS, BATCH, BATCHES_PER_COMMIT = 4, 4, 2

keras.config.set_floatx("float64")
folder, count, source = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ends = dict(zip(sys.argv[4::2], sys.argv[5::2], strict=True))
renewal = of(os.environ)
die_at = "" if renewal.is_new else ends.get(str(renewal.number), "")
members = int(os.environ.get("MEMBERS", "0"))
keras_hvd.init()
rng = np.random.default_rng(7)
x, y = rng.normal(size=(count, 3)), rng.normal(size=(count, 1))
numbers = np.arange(count)
in_step = tf.Variable([0], shape=[None], dtype=tf.int64, trainable=False)
jobs = []


class Line(keras.Sequential):
    """Tells which rows a step has."""

    def train_step(self, data):
        numbers, rows, truth = data
        in_step.assign(numbers)
        return super().train_step((rows, truth))


keras.utils.set_random_seed(keras_hvd.rank())
model = Line([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")


def make_data(position: keras_hvd.data.Position) -> tf.data.Dataset:
    jobs.append(keras_hvd.size())
    if source == "arrays":
        return from_arrays(numbers, x, y, batch_size=BATCH, position=position)
    lines = from_files(
        str(folder / "*.txt"), "text", even=BATCH, position=position, shuffle=8
    )
    found = lines.map(lambda line: tf.strings.to_number(line, tf.int64)).batch(BATCH)
    return found.map(lambda n: (n, tf.gather(x, n), tf.gather(y, n)))


class Told(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.hooks = []
        # Unlike these it does not go back to a commit.
        self.begun = SimpleNamespace(epochs=[])

    def on_train_begin(self, logs=None):
        self.hooks.append("train")

    def on_train_end(self, logs=None):
        self.hooks.append("train's end")

    def on_epoch_begin(self, epoch, logs=None):
        self.hooks.append(f"epoch {epoch}")
        self.begun.epochs.append(epoch)
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        self.hooks.append(f"epoch {epoch}'s end")

    def on_train_batch_begin(self, batch, logs=None):
        if f"{self.epoch}.{batch}" == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        while (self.epoch, batch) == (2, 6) and keras_hvd.size() < members:
            keras_hvd.elastic.ObjectState().check_host_updates()

    def on_train_batch_end(self, batch, logs=None):
        step = [self.epoch, keras_hvd.size(), batch], in_step.numpy().tolist()
        with (folder / f"{os.getpid()}.steps").open("a") as file:
            file.write(json.dumps(step) + "\n")


told = Told()
history = keras_hvd.elastic.fit(
    model,
    make_data,
    epochs=EPOCHS,
    batches_per_commit=BATCHES_PER_COMMIT,
    verbose=0,
    callbacks=[keras_hvd.callbacks.MetricAverage(), told],
)
seen = {
    "rank": keras_hvd.rank(),
    "started as": renewal.number,
    "pid": os.getpid(),
    "jobs": jobs,
    "hooks": told.hooks,
    "begun": told.begun.epochs,
    "epochs": history.epoch,
    "loss": history.history["loss"],
    "weights": [each.numpy().tolist() for each in model.weights],
}
(folder / f"{os.getpid()}.json").write_text(json.dumps(seen))
