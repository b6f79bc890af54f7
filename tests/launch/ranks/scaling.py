"""A rank whose step takes a known time; it notes its reductions in a folder.

The time is 0.05 s for each rank, and half as much again where gradients are reduced.
"""

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_hvd

SECONDS = 0.05

folder = Path(sys.argv[1])
keras_hvd.init()
rank, size = keras_hvd.rank(), keras_hvd.size()
kind = Path(os.environ["KERAS_HVD_REPORT"], "scaling").read_text()

model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
model.set_weights([np.ones([1, 1])])
model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.25)), "mse")
# The error of either row is 1 + rank.
x, y = np.ones([2, 1]), np.full([2, 1], -rank)
files = [folder / name for name in ("model.keras", "checkpoint", "backup")]
callbacks = [
    keras.callbacks.ModelCheckpoint(str(files[0])),
    keras.callbacks.BackupAndRestore(str(files[2])),
]
model.fit(x, y, batch_size=2, epochs=1, callbacks=callbacks, verbose=0)
tf.train.Checkpoint(model=model).save(str(files[1]))
[[[fitted]]] = model.get_weights()

weight = tf.Variable(1.0)


@tf.function(jit_compile=True)
def gradient() -> tf.Tensor:
    with keras_hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = weight * (1.0 + rank)
    return tape.gradient(loss, [weight])[0]


taped = float(gradient())
(folder / f"{kind}-{size}-{rank}.json").write_text(json.dumps([float(fitted), taped]))
while True:
    time.sleep(SECONDS * size * (1 if kind == "meet" else 1.5))
    gradient()
