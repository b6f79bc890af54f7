"""How long an allreduce takes: `khvdrun -np 2 python benchmarks/allreduce.py`.

Sums float32 tensors of 4 B to 256 MiB over all ranks, at the C API and through a
`tf.function`, beside a `tf.function` that does nothing. Rank 0 prints a table of
medians and, with --json, writes them to a file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import keras_hvd
from keras_hvd import native

SIZES = [4 << (2 * i) for i in range(14)]
FLOAT32 = 6  # khvd_dtype
ALLREDUCE = 0  # khvd_kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="also write the medians here")
    parser.add_argument(
        "--most", type=int, default=SIZES[-1], metavar="BYTES", help="largest tensor"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="time for each figure (default: 1)"
    )
    options = parser.parse_args()
    keras_hvd.init()
    measured = []
    if keras_hvd.rank() == 0:
        print(header())
    for size in SIZES:
        if size > options.most:
            break
        row = {
            "bytes": size,
            "c_api": median(c_api(size), options.seconds),
            "tf_function": median(function(size), options.seconds),
            "empty_tf_function": median(empty_function(size), options.seconds),
        }
        measured.append(row)
        if keras_hvd.rank() == 0:
            print(line(row), flush=True)
    if options.json and keras_hvd.rank() == 0:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(describe(measured), file, indent=2)


def c_api(size: int) -> Callable[[], None]:
    """An allreduce in place, without TensorFlow."""
    array = np.zeros(size // 4, np.float32)
    tensor = native.Tensor(
        dtype=FLOAT32,
        rank=1,
        shape=(ctypes.c_int64 * 1)(array.size),
        input=array.ctypes.data,
        output=array.ctypes.data,
    )
    request = native.Request(
        struct_size=ctypes.sizeof(native.Request),
        kind=ALLREDUCE,
        name=f"benchmark/c_api/{size}".encode(),
        reduce_op=int(keras_hvd.Sum),
        count=1,
        tensors=ctypes.pointer(tensor),
    )
    request.array = array  # which the tensor only points to
    run = native.engine().khvd_run

    def call() -> None:
        if run(ctypes.byref(request)) != 0:
            raise RuntimeError(native.engine().khvd_last_error().decode())

    return call


def function(size: int) -> Callable[[], tf.Tensor]:
    """An allreduce as a training step would call it."""

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return keras_hvd.allreduce(x, keras_hvd.Sum, name=f"benchmark/function/{size}")

    given = tf.zeros([size // 4])
    return lambda: step(given)


def empty_function(size: int) -> Callable[[], tf.Tensor]:
    """What TensorFlow takes to call a function of the same signature."""
    given = tf.zeros([size // 4])
    step = tf.function(tf.identity)
    return lambda: step(given)


def median(call: Callable[[], object], seconds: float) -> float:
    """The median time of a call, after some that warm up memory and caches."""
    for _ in range(3):
        call()
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    # Every rank makes as many calls.
    repeats = keras_hvd.broadcast_object(min(max(int(seconds / once), 5), 5000))
    keras_hvd.barrier()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def header() -> str:
    return (
        f"float32, Sum, {keras_hvd.size()} ranks, {os.cpu_count()} cores\n"
        f"{'size':>9} {'C API':>12} {'tf.function':>12} {'empty function':>15}"
    )


def line(row: dict[str, float]) -> str:
    columns = [f"{text(row['bytes']):>9}"]
    for name, width in (("c_api", 12), ("tf_function", 12), ("empty_tf_function", 15)):
        columns.append(f"{duration(row[name]):>{width}}")
    return " ".join(columns)


def text(size: int) -> str:
    if size >= 1 << 20:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms"


def describe(measured: list[dict[str, float]]) -> dict[str, object]:
    return {
        "benchmark": "allreduce",
        "ranks": keras_hvd.size(),
        "cores": os.cpu_count(),
        "tensorflow": tf.__version__,
        "keras_hvd": native.engine().khvd_version().decode(),
        "unit": "seconds, median",
        "measured": measured,
    }


if __name__ == "__main__":
    main()
