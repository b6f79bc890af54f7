"""A rank of a job in which one fails, in a way that the first argument names.

The others say when they came to know, on the clock that all processes share.
"""

import os
import signal
import sys
import time

from allreduce_loop import allreduce

import keras_hvd

FAILING = 1


def fail(how: str) -> None:
    """Ends this rank, or its host's cable."""
    print(f"failing {time.monotonic()}", flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("an error of the script")
    if how == "exit":
        sys.exit(7)
    os.system("ip link set cable down")


keras_hvd.init()
try:
    for step in range(10_000):
        if step == 20 and keras_hvd.rank() == FAILING:
            fail(sys.argv[1])
        allreduce("step", 1 << 16)
except keras_hvd.KerasHvdError as error:
    print(f"raised {time.monotonic()} {error}", flush=True)
    raise
