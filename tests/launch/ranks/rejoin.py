"""Joins and leaves again and again, with the same compiled functions.

Prints, as JSON, rank 0's numbers of descriptors, threads, mappings and KiB of memory,
after a tenth of the jobs and after all of them.
"""

import json
import os
import sys
from pathlib import Path

import tensorflow as tf

import keras_hvd

JOBS = int(sys.argv[1])
TENSOR = tf.range(1000.0)


@tf.function
def in_graph(tensor: tf.Tensor) -> tf.Tensor:
    return keras_hvd.allreduce(tensor, op=keras_hvd.Sum, name="in graph")


@tf.function(jit_compile=True)
def compiled(tensor: tf.Tensor) -> tf.Tensor:
    return keras_hvd.allreduce(tensor, op=keras_hvd.Sum, name="compiled")


def held() -> dict[str, int]:
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(line for line in status if line.startswith("VmRSS:"))
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "memory": int(resident.split()[1]),
    }


shown = []
for number in range(1, JOBS + 1):
    keras_hvd.init()
    for step in (in_graph, compiled):
        tf.debugging.assert_equal(step(TENSOR), TENSOR * keras_hvd.size())
    assert keras_hvd.broadcast_object(number) == number
    if number in (JOBS // 10, JOBS):
        shown.append(held())
    rank = keras_hvd.rank()
    keras_hvd.shutdown()
if rank == 0:
    print(json.dumps(shown))
