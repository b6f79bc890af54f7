"""Timing of keras_hvd's C API, from C."""

from __future__ import annotations

import ctypes

import numpy as np

import keras_hvd
from keras_hvd.job import native

_ALLREDUCE = 0  # khvd_kind
_FLOAT32 = 6  # khvd_dtype


class Allreduce:
    """A grouped allreduce of arrays in place, prepared once.

    Args:
        timed_calls: the compiled timed_calls.c.
        name: of the tensor, the same on all ranks.
        arrays: float32; they stay as long as this object.
    """

    def __init__(self, timed_calls: str, name: str, arrays: list[np.ndarray]):
        self._library = ctypes.CDLL(timed_calls)
        self._arrays = arrays
        self._tensors = (native.Tensor * len(arrays))(*map(_tensor, arrays))
        self._request = native.Request(
            struct_size=ctypes.sizeof(native.Request),
            kind=_ALLREDUCE,
            name=name.encode(),
            reduce_op=int(keras_hvd.Sum),
            count=len(arrays),
            tensors=self._tensors,
        )

    def seconds(self, repeats: int) -> list[float]:
        """Times calls.

        Args:
            repeats: the number of calls.

        Returns:
            The time of each, in seconds.

        Raises:
            RuntimeError: the engine refused one.
        """
        seconds = (ctypes.c_double * repeats)()
        code = self._library.time_khvd_run(
            native.engine().khvd_run, ctypes.byref(self._request), repeats, seconds
        )
        if code != 0:
            raise RuntimeError(native.engine().khvd_last_error().decode())
        return list(seconds)


def _tensor(array: np.ndarray) -> native.Tensor:
    return native.Tensor(
        dtype=_FLOAT32,
        rank=1,
        shape=(ctypes.c_int64 * 1)(array.size),
        input=array.ctypes.data,
        output=array.ctypes.data,
    )
