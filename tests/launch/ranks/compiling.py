"""A rank for the tests of compiling: three steps through every gradient, under XLA.

XLA notes each program that it compiles in FOLDER/RANK, under the step's name.
"""

import os
import sys
from pathlib import Path

NOTES = Path(sys.argv[1]) / os.environ["KERAS_HVD_RANK"]
# Read when the first program is compiled.
os.environ["XLA_FLAGS"] = f"--xla_dump_to={NOTES} --xla_dump_hlo_as_text"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_hvd  # noqa: E402


def steps() -> dict:
    layer = keras_hvd.SyncBatchNormalization()
    layer.build((None, 3))
    rows_to_each = [8 // keras_hvd.size()] * keras_hvd.size()
    return {
        "allgather": keras_hvd.allgather,
        "allreduce": keras_hvd.allreduce,
        "alltoall": keras_hvd.alltoall,
        "alltoall_of_splits": lambda x: keras_hvd.alltoall(x, rows_to_each)[0],
        "broadcast": lambda x: keras_hvd.broadcast(x, 0),
        "reducescatter": keras_hvd.reducescatter,
        "statistics": lambda x: layer(x, training=True),
    }


def gradient_of(collective, name):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(collective(x) ** 2)
        return tape.gradient(loss, x)

    step.__name__ = f"step_of_{name}"
    return tf.function(step, jit_compile=True, autograph=False)


def main() -> None:
    keras_hvd.init()
    for name, collective in steps().items():
        step = gradient_of(collective, name)
        for number in range(3):
            step(tf.constant(np.full((8, 3), number, "float32")))


if __name__ == "__main__":
    main()
