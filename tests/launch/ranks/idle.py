"""A rank for the tests of waiting: trains a little, then does nothing.

It says "idle PID" and reads the pipe FOLDER/RANK until the test has closed it.
"""

import os
import sys
from pathlib import Path

import keras
import numpy as np

import keras_hvd


def main() -> None:
    keras_hvd.init()
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
    model.compile(optimizer=optimizer, loss="mse")
    start_equal = keras_hvd.callbacks.BroadcastGlobalVariables(0)
    model.fit(np.ones((64, 16)), np.ones(64), verbose=0, callbacks=[start_equal])
    pipe = Path(sys.argv[1]) / str(keras_hvd.rank())
    print(f"idle {os.getpid()}", flush=True)
    pipe.read_bytes()


if __name__ == "__main__":
    main()
