"""A rank for the tests of recordings: trains on digits, rank 1 later than the others.

Then they wait until rank 0 gets a line, and rank 1 kills itself. Rank 0 writes the
content of the recording after that.
"""

import os
import pickle
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_hvd
from keras_hvd.callbacks import BroadcastGlobalVariables
from keras_hvd.job import settings
from keras_hvd.report import recording

BATCH, EPOCHS, IMAGES = 16, 2, 320


class Late(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if keras_hvd.rank() == 1:
            time.sleep(0.1)


class Slow(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.25)


def main() -> None:
    keras_hvd.init()
    images, labels = load_digits(return_X_y=True)
    mine = slice(keras_hvd.rank(), 2 * IMAGES, 2)
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(32, "relu"),
            keras.layers.Dense(10, "softmax"),
        ]
    )
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    saved = keras.callbacks.ModelCheckpoint(f"{sys.argv[1]}.keras")
    history = model.fit(
        *(images[mine] / 16, labels[mine]),
        batch_size=BATCH,
        epochs=EPOCHS,
        validation_split=0.2,
        callbacks=[BroadcastGlobalVariables(0), Late(), Slow(), saved],
        verbose=1,
    )
    if keras_hvd.rank() == 0:
        print("trained", flush=True)
        sys.stdin.readline()
    keras_hvd.broadcast_object("go on", name="go on")
    if keras_hvd.rank() == 1:
        print("Traceback\nKeyError: 'of \"rank 1\"'", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        keras_hvd.allreduce(np.ones(3), name="never")
    except tf.errors.AbortedError:
        keras_hvd.shutdown()
    folder = settings.report()
    found = recording.read(folder), recording.waits(folder), history.history
    Path(sys.argv[1]).write_bytes(pickle.dumps(found))


main()
