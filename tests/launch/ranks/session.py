"""A rank for the tests of failures: trains in a monitored session of TensorFlow 1.

It says "looping PID" once it trains, and notes in RECORDS/N.json which error ended it
and when, on the clock that all processes of a machine share.
"""

import json
import os
import sys
import time
from pathlib import Path

import tensorflow as tf

import keras_hvd

v1 = tf.compat.v1


def train() -> None:
    with tf.Graph().as_default():
        weight = v1.get_variable("weight", (1000,))
        gradient = keras_hvd.allreduce(2 * weight, name="gradient")
        step = weight.assign_sub(0.1 * gradient)
        v1.train.get_or_create_global_step()
        hooks = [keras_hvd.BroadcastGlobalVariablesHook(0)]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            session.run(step)
            print(f"looping {os.getpid()}", flush=True)
            while not session.should_stop():
                session.run(step)


if __name__ == "__main__":
    keras_hvd.init()
    record = Path(sys.argv[1]) / f"{keras_hvd.rank()}.json"
    try:
        train()
    except Exception as error:
        note = {"type": type(error).__name__, "text": str(error)}
        # A signal may end this rank at any time: the record is complete, or not there.
        begun = record.with_suffix(".begun")
        begun.write_text(json.dumps(note | {"at": time.monotonic()}))
        begun.rename(record)
        raise
