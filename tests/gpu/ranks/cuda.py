"""A GPU through the CUDA driver's C interface: its memory, streams and events.

It uses the driver's functions that the engine uses too, as the stand-ins of the tests
without a GPU have only these. `free_bytes` is the exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Iterator

import numpy as np

SYSTEM_LIBRARY = "libcuda.so.1"
_NOT_READY = 600
_NON_BLOCKING = 1
_NO_TIMING = 2

_POINTER = ctypes.c_uint64
_HANDLE = ctypes.c_void_p
_FUNCTIONS = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_HANDLE), ctypes.c_int],
    "cuDevicePrimaryCtxRelease_v2": [ctypes.c_int],
    "cuCtxPushCurrent_v2": [_HANDLE],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(_HANDLE)],
    "cuStreamCreateWithPriority": [
        ctypes.POINTER(_HANDLE),
        ctypes.c_uint,
        ctypes.c_int,
    ],
    "cuStreamDestroy_v2": [_HANDLE],
    "cuStreamWaitEvent": [_HANDLE, _HANDLE, ctypes.c_uint],
    "cuEventCreate": [ctypes.POINTER(_HANDLE), ctypes.c_uint],
    "cuEventRecord": [_HANDLE, _HANDLE],
    "cuEventQuery": [_HANDLE],
    "cuEventElapsedTime": [ctypes.POINTER(ctypes.c_float), _HANDLE, _HANDLE],
    "cuEventDestroy_v2": [_HANDLE],
    "cuMemAlloc_v2": [ctypes.POINTER(_POINTER), ctypes.c_size_t],
    "cuMemFree_v2": [_POINTER],
    "cuMemHostAlloc": [ctypes.POINTER(_HANDLE), ctypes.c_size_t, ctypes.c_uint],
    "cuMemFreeHost": [_HANDLE],
    "cuMemcpyHtoDAsync_v2": [_POINTER, _HANDLE, ctypes.c_size_t, _HANDLE],
    "cuMemcpyDtoHAsync_v2": [_HANDLE, _POINTER, ctypes.c_size_t, _HANDLE],
    "cuMemsetD8Async": [_POINTER, ctypes.c_ubyte, ctypes.c_size_t, _HANDLE],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


class CudaError(Exception):
    """The driver refused a call; the text names it."""


class Gpu:
    """One device, its primary context current on the thread that makes it.

    Args:
        library: the driver's; "" for the system's.
        ordinal: the device's number.
    """

    def __init__(self, library: str, ordinal: int):
        self._library = ctypes.CDLL(library or SYSTEM_LIBRARY)
        for name, arguments in _FUNCTIONS.items():
            getattr(self._library, name).argtypes = arguments
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._device = device.value
        self._context = _HANDLE()
        self._call(
            "cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device
        )
        self._call("cuCtxPushCurrent_v2", self._context)

    def close(self) -> None:
        """Gives the context back, and with it all objects in it."""
        self._call("cuCtxPopCurrent_v2", ctypes.byref(_HANDLE()))
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the context that of the calling thread."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(_HANDLE()))

    def new_stream(self) -> int:
        """A stream that is independent of the default one."""
        return self._new("cuStreamCreateWithPriority", _NON_BLOCKING, 0)

    def destroy_stream(self, stream: int) -> None:
        """Gives a stream back."""
        self._call("cuStreamDestroy_v2", stream)

    def new_event(self, timed: bool = False) -> int:
        """An event."""
        return self._new("cuEventCreate", 0 if timed else _NO_TIMING)

    def destroy_event(self, event: int) -> None:
        """Gives an event back."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """Marks the end of the work that is on a stream."""
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Makes a stream wait for an event."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def has_passed(self, event: int) -> bool:
        """Whether an event has come."""
        code = self._library.cuEventQuery(event)
        if code != _NOT_READY:
            self._check("cuEventQuery", code)
        return code == 0

    def seconds_between(self, start: int, end: int) -> float:
        """The time between two timed events that have come."""
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value / 1e3

    def synchronize(self, stream: int, seconds: float = 60) -> None:
        """Waits until all work on a stream has run."""
        event = self.new_event()
        self.record(event, stream)
        deadline = time.monotonic() + seconds
        while not self.has_passed(event):
            if time.monotonic() > deadline:
                raise CudaError(f"a stream has not ended for {seconds} s")
            os.sched_yield()
        self.destroy_event(event)

    def allocate(self, size: int) -> int:
        """The address of memory on the device."""
        address = _POINTER()
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        """Gives memory on the device back."""
        self._call("cuMemFree_v2", address)

    def allocate_host(self, size: int) -> np.ndarray:
        """Memory of the host that the device copies by itself, as bytes."""
        address = _HANDLE()
        self._call("cuMemHostAlloc", ctypes.byref(address), size, 0)
        return np.ctypeslib.as_array(
            (ctypes.c_ubyte * size).from_address(address.value)
        )

    def free_host(self, memory: np.ndarray) -> None:
        """Gives memory of the host back."""
        self._call("cuMemFreeHost", memory.ctypes.data)

    def copy_to_device(self, address: int, data: np.ndarray, stream: int) -> None:
        """Copies from memory that `allocate_host` gave."""
        if data.nbytes:
            self._call(
                "cuMemcpyHtoDAsync_v2", address, data.ctypes.data, data.nbytes, stream
            )

    def copy_to_host(self, data: np.ndarray, address: int, stream: int) -> None:
        """Copies to memory that `allocate_host` gave."""
        if data.nbytes:
            self._call(
                "cuMemcpyDtoHAsync_v2", data.ctypes.data, address, data.nbytes, stream
            )

    def fill(self, address: int, value: int, size: int, stream: int) -> None:
        """Sets bytes on the device."""
        if size:
            self._call("cuMemsetD8Async", address, value, size, stream)

    def free_bytes(self) -> int | None:
        """How much of the device's memory is free; None if the driver does not say."""
        if not hasattr(self._library, "cuMemGetInfo_v2"):
            return None
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def addresses(self, *functions: str) -> list[int]:
        """The addresses of functions of the driver, for callers in C."""
        return [
            ctypes.cast(getattr(self._library, name), _HANDLE).value
            for name in functions
        ]

    def _new(self, function: str, *arguments: int) -> int:
        handle = _HANDLE()
        self._call(function, ctypes.byref(handle), *arguments)
        return handle.value

    def _call(self, function: str, *arguments: object) -> None:
        self._check(function, getattr(self._library, function)(*arguments))

    def _check(self, function: str, code: int) -> None:
        if code == 0:
            return
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        what = name.value.decode() if name.value else f"error {code}"
        raise CudaError(f"{function}: {what}")


# Prints how much memory is free: `python cuda.py LIBRARY DEVICE`.
if __name__ == "__main__":
    print(Gpu(sys.argv[1], int(sys.argv[2])).free_bytes())
