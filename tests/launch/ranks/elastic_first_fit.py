"""Makes its model's variables by a `fit` of one batch, as scripts for Horovod do.

It does so again in each later job. Takes a folder, for what each rank has seen. Rank 1
dies once, in epoch 2, and is started again.
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import keras_hvd
from keras_hvd.world.renewal import of

EPOCHS = 6

folder, told = Path(sys.argv[1]), of(os.environ)
keras_hvd.init()
words = np.arange(24).reshape(12, 2) % 5
wanted = np.ones((12, 1))
model = keras.Sequential(
    [keras.layers.Embedding(5, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
)
optimizer = keras.optimizers.Adam(0.01 * keras_hvd.size())
model.compile(keras_hvd.DistributedOptimizer(optimizer), "mse")


def fit_first():
    model.fit(words, wanted, steps_per_epoch=1, epochs=1, verbose=0)


fit_first()
state = keras_hvd.elastic.KerasState(model, epoch=0, batch=0)
sizes, rates = [], []


def reset():
    model.optimizer.learning_rate = 0.01 * keras_hvd.size()
    fit_first()


class Told(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if (state.epoch, told.number, told.is_new) == (2, 1, False):
            os.kill(os.getpid(), signal.SIGKILL)
        while state.epoch == 3 and keras_hvd.size() < 3:
            state.check_host_updates()


state.register_reset_callbacks([reset])
callbacks = [
    keras_hvd.elastic.UpdateEpochStateCallback(state),
    keras_hvd.elastic.UpdateBatchStateCallback(state),
    keras_hvd.elastic.CommitStateCallback(state),
    Told(),
]
if keras_hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras"))


@keras_hvd.elastic.run
def train(state):
    sizes.append(keras_hvd.size())
    rates.append(round(float(model.optimizer.learning_rate), 6))
    model.fit(
        *keras_hvd.data.part(words, wanted),
        batch_size=4,
        initial_epoch=state.epoch,
        epochs=EPOCHS,
        callbacks=callbacks,
        verbose=0,
    )


train(state)
seen = {
    "rank": keras_hvd.rank(),
    "epoch": state.epoch,
    "sizes": sizes,
    "rates": rates,
    "weights": [each.numpy().tolist() for each in model.weights],
}
(folder / f"{os.getpid()}.json").write_text(json.dumps(seen))
