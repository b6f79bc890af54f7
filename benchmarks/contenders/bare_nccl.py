"""NCCL itself, through ctypes, which the engine is compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

_ID_BYTES = 128


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which the first rank makes and all others need."""

    _fields_ = [("bytes", ctypes.c_char * _ID_BYTES)]


class Calls(ctypes.Structure):
    """nccl_calls of timed_gpu_calls.c."""

    _fields_ = [
        ("start", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("allreduce", ctypes.c_void_p),
        ("communicator", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("tensors", ctypes.POINTER(ctypes.c_void_p)),
        ("elements", ctypes.POINTER(ctypes.c_int64)),
    ]


class Library:
    """NCCL, opened as the engine opens it.

    Args:
        path: the library; "" for that of the library path.
    """

    def __init__(self, path: str):
        self._library = ctypes.CDLL(path or "libnccl.so.2")
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclCommInitRankConfig.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            UniqueId,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        self._library.ncclCommDestroy.argtypes = [ctypes.c_void_p]

    def new_id(self) -> bytes:
        """A new ID for a communicator, which all its members need."""
        made = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return ctypes.string_at(ctypes.byref(made), _ID_BYTES)

    def connect(self, unique_id: bytes, rank: int, size: int) -> ctypes.c_void_p:
        """Returns a communicator once all ranks have called this."""
        made = ctypes.c_void_p()
        given = UniqueId.from_buffer_copy(unique_id)
        # Without a configuration, as most programs use NCCL: its calls may wait.
        self._call(
            "ncclCommInitRankConfig", ctypes.byref(made), size, given, rank, None
        )
        return made

    def destroy(self, communicator: ctypes.c_void_p) -> None:
        """Gives a communicator back."""
        self._call("ncclCommDestroy", communicator)

    def calls(
        self,
        communicator: ctypes.c_void_p,
        addresses: Sequence[int],
        elements: Sequence[int],
    ) -> Calls:
        """A group of allreduces of float32, in place."""
        count = len(addresses)
        return Calls(
            self._address("ncclGroupStart"),
            self._address("ncclGroupEnd"),
            self._address("ncclAllReduce"),
            communicator,
            count,
            (ctypes.c_void_p * count)(*addresses),
            (ctypes.c_int64 * count)(*elements),
        )

    def _address(self, function: str) -> int:
        return ctypes.cast(getattr(self._library, function), ctypes.c_void_p).value

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            text = self._library.ncclGetErrorString(code).decode()
            raise RuntimeError(f"{function}: {text}")
