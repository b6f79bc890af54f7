"""An allreduce at the C API that is run again and again."""

from __future__ import annotations

import ctypes
import time

from keras_hvd.job import native


class Request:
    """An allreduce of float32 that is run again and again."""

    def __init__(self, size: int):
        elements = size // 4
        self._shape = (ctypes.c_int64 * 1)(elements)
        self._values = (ctypes.c_float * elements)()
        address = ctypes.addressof(self._values)
        self._tensor = native.Tensor(
            dtype=6, rank=1, shape=self._shape, input=address, output=address
        )
        self._request = native.Request(
            struct_size=ctypes.sizeof(native.Request),
            name=b"values",
            submitter=1,
            reduce_op=1,
            count=1,
            tensors=ctypes.pointer(self._tensor),
        )

    def run(self, calls: int) -> float:
        """Makes these calls; returns the seconds that one took."""
        run, reference = native.engine().khvd_run, ctypes.byref(self._request)
        start = time.perf_counter()
        for _ in range(calls):
            code = run(reference)
        assert code == 0, native.engine().khvd_last_error().decode()
        return (time.perf_counter() - start) / calls
