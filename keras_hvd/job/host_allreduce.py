"""Timed allreduces of host memory, which need nothing but the engine."""

from __future__ import annotations

import ctypes
import time

from keras_hvd.job import basics, native

# khvd_reduce_op of tf_ops/engine/c_api.h
SUM, MIN, MAX = 1, 2, 3


class HostAllreduce:
    """An allreduce of float32 numbers in place, prepared once.

    `memory` is the address of `size` bytes, a multiple of 4. The caller keeps them
    alive.
    """

    def __init__(self, name: str, memory: int, size: int, op: int = SUM):
        self._shape = (ctypes.c_int64 * 1)(size // 4)
        self._tensor = native.Tensor(
            dtype=native.DTYPES["float32"],
            rank=1,
            shape=self._shape,
            input=memory,
            output=memory,
        )
        self._request = native.Request(
            kind=native.ALLREDUCE,
            name=name.encode(),
            reduce_op=op,
            count=1,
            tensors=ctypes.pointer(self._tensor),
        )
        self._pointer = ctypes.byref(self._request)
        self._run = native.engine().khvd_run
        self._pending = ctypes.c_void_p()

    def seconds(self, calls: int) -> list[float]:
        """Makes `calls` calls and times each, from one's end to the next."""
        times = [time.perf_counter()]
        for _ in range(calls):
            code = self._run(self._pointer)
            times.append(time.perf_counter())
            if code != 0:
                basics.check(code)
        return [after - before for before, after in zip(times, times[1:])]

    def begin(self) -> None:
        """Begins a call without waiting. The engine has the memory from then on.

        Example:

        >>> import keras_hvd
        >>> keras_hvd.init()
        >>> number = (ctypes.c_float * 1)(0.5)
        >>> allreduce = HostAllreduce("later", ctypes.addressof(number), 4)
        >>> allreduce.begin()
        >>> allreduce.finish()
        >>> number[0]
        0.5
        """
        engine = native.engine()
        basics.check(engine.khvd_begin(self._pointer, ctypes.byref(self._pending)))

    def finish(self) -> None:
        """Waits for the end of the call that was begun."""
        basics.check(native.engine().khvd_finish(self._pending))


def over_ranks(name: str, value: float, op: int) -> float:
    """A number of each rank, reduced over all of them.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> over_ranks("largest", 0.5, MAX)
    0.5
    """
    number = (ctypes.c_float * 1)(value)
    HostAllreduce(f"{name}/{op}", ctypes.addressof(number), 4, op).seconds(1)
    return number[0]
