"""A rank for the tests of process sets given to init, without TensorFlow.

Told to differ, rank 1 gives the sets in another order than the others.
"""

import os
import sys

import keras_hvd

rank, size = int(os.environ["KERAS_HVD_RANK"]), int(os.environ["KERAS_HVD_SIZE"])
differs = sys.argv[1] == "differ" and rank == 1
first = keras_hvd.ProcessSet([0])
rest = keras_hvd.ProcessSet(range(1, size))
keras_hvd.init(process_sets=[rest, first] if differs else [first, rest])
keras_hvd.init(process_sets=[rest])  # which changes nothing
assert (first.process_set_id, rest.process_set_id) == (1, 2)
own = first if rank == 0 else rest
assert keras_hvd.allgather_object(rank, process_set=own) == own.ranks
assert keras_hvd.allgather_object(rank) == list(range(size))
keras_hvd.shutdown()
assert first.process_set_id is None
assert rest.size() is None
print("done")
