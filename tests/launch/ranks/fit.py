"""A rank for the tests of failures: trains with Keras' `fit` until something happens.

With "--xla" before RECORDS, XLA compiles the steps.

It says "looping PID" once it trains, and notes in RECORDS/N.json which error ended it
and when, on the clock that all processes of a machine share.
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


class SayLooping(keras.callbacks.Callback):
    """Tells the test that the first step is done."""

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if batch == 0:
            print(f"looping {os.getpid()}", flush=True)


def main() -> None:
    keras_hvd.init()
    keras.utils.set_random_seed(keras_hvd.rank())
    inputs = np.random.rand(64, 16).astype("float32")
    model = keras.Sequential(
        [
            keras.Input((16,)),
            *(keras.layers.Dense(64, activation="tanh") for _ in range(4)),
            keras.layers.Dense(1),
        ]
    )
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
    model.compile(optimizer=optimizer, loss="mse", jit_compile="--xla" in sys.argv)
    # One iterator for all epochs: to delete one, as Keras does between epochs, can take
    # tf.data seconds on a busy machine, in which a rank has nothing to raise from.
    dataset = tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(axis=1)))
    record = Path(sys.argv[-1]) / f"{keras_hvd.rank()}.json"
    try:
        model.fit(
            dataset.batch(8).repeat(),
            steps_per_epoch=8,
            epochs=1_000_000,
            verbose=0,
            callbacks=[keras_hvd.callbacks.BroadcastGlobalVariables(0), SayLooping()],
        )
    except Exception as error:
        times = {"at": time.monotonic(), "cpu": time.process_time()}
        note = {"type": type(error).__name__, "text": str(error), **times}
        # A signal may end this rank at any time: the record is complete, or not there.
        begun = record.with_suffix(".begun")
        begun.write_text(json.dumps(note))
        begun.rename(record)
        raise


if __name__ == "__main__":
    main()
