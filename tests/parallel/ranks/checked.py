"""A rank for the tests of the consistency mode, without TensorFlow.

It sums three tensors as a group. Told to be wrong, rank 1 gives the results of the last
two one place in memory, so that it keeps only the last one's.
"""

import ctypes
import sys

import numpy as np

import keras_hvd
from keras_hvd.job import basics, native


def tensor(value: np.ndarray, result: np.ndarray) -> native.Tensor:
    return native.Tensor(
        dtype=6,
        rank=1,
        shape=(ctypes.c_int64 * 1)(value.size),
        input=value.ctypes.data,
        output=result.ctypes.data,
    )


keras_hvd.init()
values = [np.full(1000, number, np.float32) for number in (1, 2, 3)]
results = [np.zeros_like(value) for value in values]
if sys.argv[1] == "wrong" and keras_hvd.rank() == 1:
    results[1] = results[2]
tensors = (native.Tensor * 3)(*map(tensor, values, results))
request = native.Request(
    struct_size=ctypes.sizeof(native.Request),
    name=b"gradients",
    reduce_op=1,
    count=3,
    tensors=tensors,
)
for _ in range(3):
    basics.check(native.engine().khvd_run(ctypes.byref(request)))
print("done")
