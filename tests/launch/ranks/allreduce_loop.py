"""A rank for the tests of failures: allreduces in a loop, without TensorFlow.

It says "looping PID" once it is in the loop, and notes in RECORDS/N.json which error
ended it and when, on the clock that all processes of a machine share.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import keras_hvd
from keras_hvd import exceptions
from keras_hvd.job import native

ELEMENTS = (1, 1000, 1 << 16, 1 << 20, 3 << 20)
# Values of khvd_reduce_op.
SUM, MAX = 1, 3


def allreduce(name: str, elements: int) -> None:
    """Sums a tensor of ones over all ranks and checks the result."""
    values = (ctypes.c_int32 * elements)()
    ctypes.memset(values, 1, ctypes.sizeof(values))
    reduce_in_place(name, values, SUM)
    expected = 0x01010101 * keras_hvd.size()
    assert values[0] == values[elements - 1] == expected


def reduce_in_place(name: str, values: ctypes.Array, reduce_op: int) -> None:
    """Reduces an array of int32 over all ranks."""
    shape = (ctypes.c_int64 * 1)(len(values))
    address = ctypes.addressof(values)
    tensor = native.Tensor(dtype=2, rank=1, shape=shape, input=address, output=address)
    request = native.Request(
        struct_size=ctypes.sizeof(native.Request),
        kind=0,
        name=name.encode(),
        submitter=1,
        reduce_op=reduce_op,
        count=1,
        tensors=ctypes.pointer(tensor),
    )
    code = native.engine().khvd_run(ctypes.byref(request))
    if code != 0:
        raise exceptions.from_code(code, native.engine().khvd_last_error().decode())


def fork() -> None:
    """Uses the engine in a child, and tells its error by this rank's stdout."""
    child = os.fork()
    if child == 0:
        try:
            allreduce("in a child", 1)
        except exceptions.ForkedError as error:
            print(f"child: {type(error).__name__}: {error}", flush=True)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def overflow() -> None:
    raise ValueError("this rank's own error")


DEEDS = {
    "exit": lambda: sys.exit(0),
    "vanish": lambda: os._exit(0),
    "crash": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exec": lambda: os.execvp("sleep", ["sleep", "1000"]),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": overflow,
    "fork": fork,
    "shutdown": keras_hvd.shutdown,
}


def loop(options: argparse.Namespace) -> None:
    culprit = keras_hvd.rank() == options.culprit
    for step in range(options.steps):
        # The same sizes on all ranks.
        elements = random.Random(step).choice(ELEMENTS)
        if step == 1:
            print(f"looping {os.getpid()}", flush=True)
        if culprit and step == options.at:
            if options.deed == "skip":
                continue
            (options.records / "deed").write_text(str(time.monotonic()))
            DEEDS[options.deed]()
        allreduce(f"step {step % 10}{options.padding}", elements)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--culprit", type=int, default=-1)
    parser.add_argument("--deed", choices=(*DEEDS, "skip"))
    parser.add_argument("--at", type=int, default=20)
    parser.add_argument("--resident-bytes", type=int, default=0)
    parser.add_argument("--name-bytes", type=int, default=0)
    # A named pipe: rank 1 of two goes on after rank 0 has joined.
    parser.add_argument("--after-rank-0", type=Path)
    options = parser.parse_args()
    options.padding = " " + "x" * options.name_bytes if options.name_bytes else ""

    keras_hvd.init()
    if options.after_rank_0 is not None:
        with options.after_rank_0.open("wb" if keras_hvd.rank() == 0 else "rb"):
            pass
    resident = ctypes.create_string_buffer(1)
    if keras_hvd.rank() == options.culprit:
        resident = ctypes.create_string_buffer(options.resident_bytes or 1)
    ctypes.memset(resident, 1, len(resident))
    record = options.records / f"{keras_hvd.rank()}.json"
    try:
        loop(options)
    except keras_hvd.KerasHvdError as error:
        at = time.monotonic()
        note = {"type": type(error).__name__, "text": str(error), "at": at}
        # A signal may end this rank at any time: the record is complete, or not there.
        begun = record.with_suffix(".begun")
        begun.write_text(json.dumps(note))
        begun.rename(record)
        raise


if __name__ == "__main__":
    main()
