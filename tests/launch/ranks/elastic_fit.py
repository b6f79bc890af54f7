"""Trains a line by elastic.fit in float64, and writes what it and its callbacks saw.

Takes a folder, and then pairs of a rank, as it was started, and the epoch in whose
second step that one dies by SIGKILL. If MEMBERS is set, epoch 5 waits for so many
ranks.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_hvd
from keras_hvd.world.renewal import of

EPOCHS, STEPS, ROWS = 30, 4, 12

keras.config.set_floatx("float64")
folder = Path(sys.argv[1])
ends = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
renewal = of(os.environ)
die_at = -1 if renewal.is_new else int(ends.get(str(renewal.number), "-1"))
members = int(os.environ.get("MEMBERS", "0"))
keras_hvd.init()
rng = np.random.default_rng(7)
x, y = rng.normal(size=(STEPS * ROWS, 3)), rng.normal(size=(STEPS * ROWS, 1))
y += x @ [[1.0], [-2.0], [0.5]]
keras.utils.set_random_seed(keras_hvd.rank())
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
sizes, epochs, said = [], [], []


def make_data() -> tf.data.Dataset:
    """Each step has the same rows, whatever the number of ranks is."""
    rank, size = keras_hvd.rank(), keras_hvd.size()
    sizes.append(size)
    steps = np.arange(STEPS * ROWS).reshape(STEPS, ROWS)
    mine = steps[:, rank::size].reshape(-1)
    return tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(ROWS // size)


class Told(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        said.append("begin")
        self.ended = 0

    def on_train_end(self, logs=None):
        said.append("end")

    def on_epoch_begin(self, epoch, logs=None):
        epochs.append(epoch)
        if epoch == 5:
            (folder / "others wait").touch()
        while epoch == 5 and keras_hvd.size() < members:
            keras_hvd.elastic.ObjectState().check_host_updates()

    def on_epoch_end(self, epoch, logs=None):
        self.ended += 1

    def on_train_batch_begin(self, batch, logs=None):
        if (epochs[-1], batch) == (die_at, 1):
            os.kill(os.getpid(), signal.SIGKILL)


early = keras.callbacks.EarlyStopping("loss", min_delta=0.005, patience=3)
plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, 2, min_delta=0.05)
told = Told()
if renewal.is_new:
    # It would come sooner if the others were slow.
    while not (folder / "others wait").exists():
        time.sleep(0.01)
history = keras_hvd.elastic.fit(
    model,
    make_data,
    epochs=EPOCHS,
    verbose=0,
    callbacks=[
        keras_hvd.callbacks.MetricAverage(),
        early,
        plateau,
        keras.callbacks.CSVLogger(folder / "log.csv"),
        told,
    ],
)
seen = {
    "rank": keras_hvd.rank(),
    "started as": renewal.number,
    "sizes": sizes,
    "epochs": epochs,
    "said": said,
    "ended": told.ended,
    "history": history.history,
    "history's epochs": history.epoch,
    "early": [early.best, early.wait, early.stopped_epoch, early.min_delta],
    "weights": [each.numpy().tolist() for each in model.weights],
}
(folder / f"{os.getpid()}.json").write_text(json.dumps(seen))
