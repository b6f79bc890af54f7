"""A rank for the measurement of how soon a death is known, one job after the other.

It reads a job from each line of stdin. It reduces in the job until it is killed itself
or hears of another rank's death, and tells when that was. The slow parts, starting and
touching memory, are done once.
"""

import ctypes
import json
import os
import random
import sys
import time

from allreduce_loop import ELEMENTS, allreduce

import keras_hvd


def reduce_until_the_end() -> dict:
    """Reduces until a rank dies; returns the time and text of this rank's error."""
    step = 0
    try:
        while True:
            allreduce(f"step {step % 10}", random.Random(step).choice(ELEMENTS))
            step += 1
            if step == 1:
                print("looping", flush=True)
    except keras_hvd.KerasHvdError as error:
        at = time.monotonic()
        return {"type": type(error).__name__, "text": str(error), "at": at}


def main() -> None:
    resident = ctypes.create_string_buffer(int(sys.argv[1]))
    ctypes.memset(resident, 1, len(resident))
    print("ready", flush=True)
    for line in sys.stdin:
        os.environ.update(json.loads(line))
        keras_hvd.init()
        print(json.dumps(reduce_until_the_end()), flush=True)
        keras_hvd.shutdown()


if __name__ == "__main__":
    main()
