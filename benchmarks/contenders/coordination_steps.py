"""One rank: times steps of many allreduces of one float, which are submitted together.

The tensors travel in the messages of coordination, and nothing else does. Rank 0
prints the median, as JSON.
"""

import argparse
import ctypes
import json
import statistics

import keras_hvd
from keras_hvd.job import native


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--timed-calls", required=True, help="timed_calls.c, compiled")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    time_submit = ctypes.CDLL(options.timed_calls).time_khvd_submit
    keras_hvd.init()
    shape = (ctypes.c_int64 * 1)(1)
    values = (ctypes.c_float * options.requests)()
    tensors = (native.Tensor * options.requests)()
    requests = (native.Request * options.requests)()
    for i in range(options.requests):
        address = ctypes.addressof(values) + 4 * i
        tensors[i] = native.Tensor(
            dtype=6, rank=1, shape=shape, input=address, output=address
        )
        requests[i] = native.Request(
            struct_size=ctypes.sizeof(native.Request),
            name=f"tensor {i}".encode(),
            submitter=1,
            reduce_op=1,
            count=1,
            tensors=ctypes.pointer(tensors[i]),
        )
    seconds = (ctypes.c_double * options.steps)()
    submit = native.engine().khvd_submit
    for steps in (10, options.steps):
        assert time_submit(submit, requests, options.requests, steps, seconds) == 0
    if keras_hvd.rank() == 0:
        print(json.dumps({"seconds": statistics.median(seconds)}), flush=True)


if __name__ == "__main__":
    main()
