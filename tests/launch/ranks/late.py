"""Ranks whose steps take 0.05 s, or on rank 1 a given number of times as long."""

import sys
import time

import keras
import numpy as np

import keras_hvd
from keras_hvd.callbacks import BroadcastGlobalVariables

SECONDS = 0.05

keras_hvd.init()
late = float(sys.argv[1]) if keras_hvd.rank() == 1 else 1


class Waits(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(SECONDS * late)


model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
x, y = np.ones([8 * 100, 1]), np.ones([8 * 100, 1])
callbacks = [BroadcastGlobalVariables(0), Waits()]
model.fit(x, y, batch_size=8, epochs=1, callbacks=callbacks, verbose=0)
