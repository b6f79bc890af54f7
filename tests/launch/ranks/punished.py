"""Counts steps until a file is there: none is lost, and none is made twice.

Takes the file, and how the others take it when a rank is gone: "survives", "ends" or
"hangs". With "is short" it does not wait for the file.
"""

import signal
import sys
from pathlib import Path

import keras_hvd

file, how = Path(sys.argv[1]), sys.argv[2]
keras_hvd.init()
state = keras_hvd.elastic.ObjectState(steps=[], sizes=[])


@keras_hvd.elastic.run
def train(state):
    state.sizes.append(keras_hvd.size())
    if keras_hvd.size() < max(state.sizes) and how in ("ends", "hangs"):
        sys.exit(3) if how == "ends" else signal.pause()
    while not any(keras_hvd.allgather_object(file.exists())):
        step = len(state.steps)
        if how == "is short" and step == 50:
            break
        assert {*keras_hvd.allgather_object(step)} == {step}
        state.steps = [*state.steps[-999:], step]
        state.commit()


train(state)
