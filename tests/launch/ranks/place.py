"""A rank that prints its place, and whether it imported mpi4py."""

import json
import socket
import sys

from allreduce_loop import allreduce

import keras_hvd

keras_hvd.init()
allreduce("first", 1 << 20)
print(
    json.dumps(
        {
            "rank": keras_hvd.rank(),
            "size": keras_hvd.size(),
            "local": [keras_hvd.local_rank(), keras_hvd.local_size()],
            "cross": [keras_hvd.cross_rank(), keras_hvd.cross_size()],
            "host": socket.gethostname(),
            "mpi4py": "mpi4py" in sys.modules,
        }
    ),
    flush=True,
)
