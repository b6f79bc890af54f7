"""A rank that carries out each collective across hosts, and says what carried bytes.

Results are compared with NumPy's.
"""

import ctypes
import json
import sys

import numpy as np
import tensorflow as tf

import keras_hvd
from keras_hvd.job import native

keras_hvd.init()
RANK, SIZE = keras_hvd.rank(), keras_hvd.size()


def of(rank: int, rows: int) -> np.ndarray:
    """A rank's input: small whole numbers, of which all sums are exact."""
    drawn = np.random.default_rng(1000 * rows + rank)
    return drawn.integers(0, 100, (rows, 3)).astype(np.float32)


# Small ones, and of many messages.
for rows in (SIZE, 1000 * SIZE, 100_003 * SIZE):
    all_inputs = [of(rank, rows) for rank in range(SIZE)]
    given = tf.constant(all_inputs[RANK])
    total = np.sum(all_inputs, axis=0)
    reduced = keras_hvd.allreduce(given, op=keras_hvd.Sum, name=f"sum {rows}")
    np.testing.assert_array_equal(reduced, total)
    gathered = keras_hvd.allgather(given[: rows - RANK], name=f"gather {rows}")
    parts = [one[: rows - rank] for rank, one in enumerate(all_inputs)]
    np.testing.assert_array_equal(gathered, np.concatenate(parts))
    for root in range(SIZE):
        copied = keras_hvd.broadcast(given, root, name=f"from {root} {rows}")
        np.testing.assert_array_equal(copied, all_inputs[root])
    share = rows // SIZE
    mine = slice(RANK * share, (RANK + 1) * share)
    scattered = keras_hvd.reducescatter(given, op=keras_hvd.Sum, name=f"share {rows}")
    np.testing.assert_array_equal(scattered, total[mine])
    traded, _ = keras_hvd.alltoall(given, [share] * SIZE, name=f"trade {rows}")
    np.testing.assert_array_equal(traded, np.concatenate([a[mine] for a in all_inputs]))
    keras_hvd.barrier()

counters = native.Counters(struct_size=ctypes.sizeof(native.Counters))
native.engine().khvd_get_counters(ctypes.byref(counters))
carried = {"tcp": counters.tcp_bytes, "mpi": counters.mpi_bytes}
carried["enabled"] = keras_hvd.mpi_enabled()
version = " ".join(sys.modules["mpi4py.MPI"].Get_library_version()[:80].split())
print(json.dumps({"rank": RANK, "version": version, **carried}), flush=True)
