"""A rank of two that sends more than 2 GiB to the other at once, by MPI, then by TCP.

It compares results with NumPy's, and prints the transport that carried bytes each time.
"""

import ctypes
import json
import os
from collections.abc import Iterator

import numpy as np

import keras_hvd
from keras_hvd import exceptions
from keras_hvd.job import native

ELEMENTS = (22 << 30) // 10 + 1
# The period of the inputs, which is no power of two.
PERIOD = 999_983
ALLREDUCE, BROADCAST = 0, 2
UINT8, SUM = 0, 1


def of(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 256, PERIOD, np.uint8)


def parts(values: np.ndarray, repeated: np.ndarray) -> Iterator[tuple]:
    """Small parts of the values, each with its expected content."""
    for begin in range(0, ELEMENTS, PERIOD):
        part = values[begin : begin + PERIOD]
        yield part, repeated[: len(part)]


def fill(values: np.ndarray, repeated: np.ndarray) -> None:
    for part, wanted in parts(values, repeated):
        part[:] = wanted


def check(values: np.ndarray, repeated: np.ndarray) -> None:
    assert all(np.array_equal(part, wanted) for part, wanted in parts(values, repeated))


def run(kind: int, values: np.ndarray) -> None:
    """Carries it out in place, without TensorFlow, which would copy the values."""
    shape = (ctypes.c_int64 * 1)(ELEMENTS)
    address = values.ctypes.data
    tensor = native.Tensor(
        dtype=UINT8, rank=1, shape=shape, input=address, output=address
    )
    request = native.Request(
        struct_size=ctypes.sizeof(native.Request),
        kind=kind,
        name=b"large",
        submitter=1,
        reduce_op=SUM,
        root=1,
        count=1,
        tensors=ctypes.pointer(tensor),
    )
    code = native.engine().khvd_run(ctypes.byref(request))
    if code != 0:
        raise exceptions.from_code(code, native.engine().khvd_last_error().decode())


values = np.empty(ELEMENTS, np.uint8)
carried = {}
for by in "mpi", "tcp":
    os.environ["KERAS_HVD_CPU_OPERATIONS"] = by
    keras_hvd.init()
    rank = keras_hvd.rank()
    fill(values, of(rank))
    run(ALLREDUCE, values)
    check(values, of(0) + of(1))
    fill(values, of(rank))
    run(BROADCAST, values)
    check(values, of(1))
    counters = native.Counters(struct_size=ctypes.sizeof(native.Counters))
    native.engine().khvd_get_counters(ctypes.byref(counters))
    carried[f"by_{by}"] = [counters.mpi_bytes, counters.tcp_bytes]
    keras_hvd.shutdown()
print(json.dumps({"rank": rank, **carried}), flush=True)
