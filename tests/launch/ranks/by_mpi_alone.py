"""A rank that runs a script, and fails unless MPI alone carried its tensors."""

import ctypes
import runpy
import sys

from keras_hvd.job import native

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
counters = native.Counters(struct_size=ctypes.sizeof(native.Counters))
native.engine().khvd_get_counters(ctypes.byref(counters))
assert counters.mpi_bytes > counters.tcp_bytes == 0
