"""A rank that runs each collective across hosts, and prints the bytes by transport.

Results are compared with NumPy's. TensorFlow takes long to import.
"""

import ctypes
import json
import sys

import mixed
import numpy as np

import keras_hvd
from keras_hvd.job import native

keras_hvd.init()
RANK, SIZE = keras_hvd.rank(), keras_hvd.size()


def run(kind: int, *sizes: int, root: int = 0) -> None:
    """Carries out a collective of whole numbers, whose sums are all exact."""
    asked = mixed.Collective(
        kind,
        name=f"{kind} of {sizes} from {root}",
        dtype=np.dtype(np.int32),
        seed=[kind, root, sizes[0]],
        ranks=SIZE,
        local_ranks=keras_hvd.local_size(),
        sizes=[*sizes],
        root=root,
    )
    mixed.run(asked)


# Small tensors, and tensors of many messages.
for elements in (3 * SIZE, 3000 * SIZE, 300_009 * SIZE):
    run(mixed.ALLREDUCE, elements)
    run(mixed.ALLGATHER, *[elements - 3 * rank for rank in range(SIZE)])
    for root in range(SIZE):
        run(mixed.BROADCAST, elements, root=root)
    run(mixed.REDUCESCATTER, elements)
    run(mixed.ALLTOALL, *[elements // SIZE] * SIZE * SIZE)
    run(mixed.BARRIER, 0)

counters = native.Counters(struct_size=ctypes.sizeof(native.Counters))
native.engine().khvd_get_counters(ctypes.byref(counters))
carried = {"tcp": counters.tcp_bytes, "mpi": counters.mpi_bytes}
carried["enabled"] = keras_hvd.mpi_enabled()
version = " ".join(sys.modules["mpi4py.MPI"].Get_library_version()[:80].split())
print(json.dumps({"rank": RANK, "version": version, **carried}), flush=True)
