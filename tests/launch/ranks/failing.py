"""A rank of a job in which one fails, in a way that the first argument names.

In a folder, the second argument, it notes when. The others note when they came to know,
and their errors. The clock is the one that all processes share. mpirun may lose the
last output of ranks.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from allreduce_loop import allreduce

import keras_hvd

FAILING = 1


def note(what: str, text: str = "") -> None:
    """Writes a file of that name."""
    path = Path(sys.argv[2]) / f"{what}.json"
    # mpirun may end this process at any time: the note is complete, or not there.
    begun = path.with_suffix(".begun")
    begun.write_text(json.dumps([time.monotonic(), text]))
    begun.rename(path)


def fail(how: str) -> None:
    """Ends this rank."""
    note("failing")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("an error of the script")
    sys.exit(7)


keras_hvd.init()
try:
    for step in range(10_000):
        if step == 20 and keras_hvd.rank() == FAILING:
            fail(sys.argv[1])
        allreduce("step", 1 << 16)
except keras_hvd.KerasHvdError as error:
    note(f"raised-{keras_hvd.rank()}", str(error))
    raise
