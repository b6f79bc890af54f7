"""The engine at its C API, with tensors on a GPU and without TensorFlow."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import cuda
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from keras_hvd.job import native  # noqa: E402

# The time limit of a collective. None here is slow: one that takes longer hangs.
PATIENCE_SECONDS = 60


class Kind(enum.IntEnum):
    """khvd_kind, of collectives with tensors."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    REDUCESCATTER = 4
    ALLTOALL = 5


BARRIER = 3


class Op(enum.IntEnum):
    """khvd_reduce_op."""

    AVERAGE = 0
    SUM = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    ADASUM = 5


class Dtype(enum.IntEnum):
    """khvd_dtype."""

    UINT8 = 0
    INT8 = 1
    INT32 = 2
    INT64 = 3
    FLOAT16 = 4
    BFLOAT16 = 5
    FLOAT32 = 6
    FLOAT64 = 7
    BOOL = 8
    UINT32 = 9
    UINT64 = 10
    FLOAT8_E5M2 = 11
    FLOAT8_E4M3FN = 12

    @property
    def size(self) -> int:
        """The bytes of an element."""
        return (1, 1, 4, 8, 2, 2, 4, 8, 1, 4, 8, 1, 1)[self]

    @property
    def is_floating(self) -> bool:
        """Whether it has fractions."""
        return Dtype.FLOAT16 <= self <= Dtype.FLOAT64 or self.is_float8

    @property
    def is_float8(self) -> bool:
        """Whether it is one of the floats of 8 bits."""
        return self in (Dtype.FLOAT8_E5M2, Dtype.FLOAT8_E4M3FN)


class EngineError(Exception):
    """A call of the C API failed; the text is the engine's."""


@dataclasses.dataclass
class Tensor:
    """A tensor on the GPU.

    Args:
        dtype: its type.
        shape: row-major.
        input: its address.
        output: where the result goes; 0 where the engine asks for memory.
    """

    dtype: Dtype
    shape: Sequence[int]
    input: int
    output: int = 0


class Arena:
    """Memory on the GPU, taken piece by piece and given back as a whole."""

    def __init__(self, gpu: cuda.Gpu, size: int):
        self._gpu = gpu
        self._size = size
        self._start = gpu.allocate(size)
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> int:
        """The address of `size` new bytes."""
        with self._lock:
            address = self._start + self._taken
            self._taken += -(-size // 256) * 256
            if self._taken > self._size:
                raise MemoryError(f"an arena of {self._size} bytes is too small")
            return address

    def clear(self) -> None:
        """Takes all back; nothing that is enqueued uses it any more."""
        self._taken = 0

    def close(self) -> None:
        """Gives the memory back."""
        self._gpu.free(self._start)


class Pending:
    """A collective under way; `wait` returns when it is enqueued, or raises."""

    def __init__(self, engine: Engine, request: native.Request, with_end: bool):
        self._engine = engine
        self._request = request
        self._enqueued = threading.Event()
        self._error = ""
        self._with_end = with_end
        self._end = ctypes.c_void_p()
        self.results: dict[int, tuple[int, int]] = {}
        request.done = native.Done(self._done)
        request.allocate = native.Allocate(self._allocate)
        if with_end:
            request.end = ctypes.pointer(self._end)
        engine.check(engine.library.khvd_submit(ctypes.byref(request)))

    def wait(self) -> None:
        """Makes work put on the stream from now on run behind the collective."""
        self._await_enqueued()
        if self._with_end:
            self._await_end(self._request.stream)

    def wait_on(self, stream: int) -> None:
        """The same of another stream; for one that was submitted with an end."""
        self._await_enqueued()
        self._await_end(stream)

    def _await_enqueued(self) -> None:
        if not self._enqueued.wait(PATIENCE_SECONDS):
            raise EngineError(f"{self._request.name}: not enqueued")
        if self._error:
            raise EngineError(self._error)

    def _await_end(self, stream: int) -> None:
        self._engine.check(self._engine.library.khvd_await_end(self._end, stream))

    def _done(self, context: int, code: int, message: bytes) -> None:
        self._error = "" if code == 0 else f"code {code}: {message.decode()}"
        self._enqueued.set()

    def _allocate(self, context: int, tensor: int, first_dims, count: int) -> int:
        rows = sum(first_dims[: int(count)])
        described = self._request.tensors[tensor]
        columns = np.prod(described.shape[1 : described.rank], dtype=int)
        size = int(rows * columns) * Dtype(described.dtype).size
        address = self._engine.result_memory(size, self._request.stream)
        self.results[tensor] = address, rows
        return address


class Engine:
    """The engine of this process, in a job.

    Args:
        library: its path.
        gpu: the device of this rank's tensors.
        arena: memory for results whose size is known late.
        options: fields of khvd_options.
    """

    def __init__(self, library: str, gpu: cuda.Gpu, arena: Arena, **options: object):
        self.library = native.open_engine(library)
        self._gpu = gpu
        self._arena = arena
        made = native.Options(struct_size=ctypes.sizeof(native.Options), **options)
        self.check(self.library.khvd_init(ctypes.byref(made)))

    def submit(
        self,
        kind: Kind,
        name: str,
        tensors: Sequence[Tensor],
        stream: int,
        *,
        with_end: bool = False,
        splits: Sequence[int] | None = None,
        **fields: object,
    ) -> Pending:
        """Begins a collective behind the work on the stream."""
        request = self.request(kind, name, tensors, stream, **fields)
        if splits is not None:
            request.splits = (ctypes.c_int64 * len(splits))(*splits)
            request.split_count = len(splits)
        return Pending(self, request, with_end)

    def request(
        self,
        kind: Kind,
        name: str,
        tensors: Sequence[Tensor],
        stream: int,
        **fields: object,
    ) -> native.Request:
        """The C API's request for a collective, without the callback of its end."""
        return native.Request(
            struct_size=ctypes.sizeof(native.Request),
            kind=kind,
            name=name.encode(),
            count=len(tensors),
            tensors=(native.Tensor * len(tensors))(*map(_described, tensors)),
            on_gpu=1,
            stream=stream,
            **fields,
        )

    def barrier(self, name: str) -> None:
        """Waits for all ranks."""
        request = native.Request(
            struct_size=ctypes.sizeof(native.Request), kind=BARRIER, name=name.encode()
        )
        self.check(self.library.khvd_run(ctypes.byref(request)))

    def join(self) -> int:
        """Waits for all ranks to join, and gives the last one."""
        last = ctypes.c_int32()
        self.check(self.library.khvd_join(ctypes.byref(last)))
        return last.value

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Makes a process set; gives its number."""
        number = ctypes.c_int32()
        numbers = (ctypes.c_int32 * len(ranks))(*ranks)
        self.check(
            self.library.khvd_add_process_set(numbers, len(ranks), ctypes.byref(number))
        )
        return number.value

    def remove_process_set(self, number: int) -> None:
        """Removes a process set."""
        self.check(self.library.khvd_remove_process_set(number))

    def counters(self) -> native.Counters:
        """The engine's counters."""
        counters = native.Counters(struct_size=ctypes.sizeof(native.Counters))
        self.check(self.library.khvd_get_counters(ctypes.byref(counters)))
        return counters

    def start_timeline(self, path: str) -> None:
        """Makes rank 0 write a timeline from now on."""
        self.check(self.library.khvd_start_timeline(path.encode(), 0))

    def shutdown(self) -> None:
        """Leaves the job."""
        self.check(self.library.khvd_shutdown())

    def result_memory(self, size: int, stream: int) -> int:
        """Memory that holds no earlier result. May be called on any thread."""
        address = self._arena.take(size)
        with self._gpu.current():
            self._gpu.fill(address, 0x5A, size, stream)
        return address

    def check(self, code: int) -> None:
        """Raises the error of a failed call."""
        if code != 0:
            raise EngineError(f"code {code}: {self.library.khvd_last_error().decode()}")


def _described(tensor: Tensor) -> native.Tensor:
    return native.Tensor(
        dtype=tensor.dtype,
        rank=len(tensor.shape),
        shape=(ctypes.c_int64 * len(tensor.shape))(*tensor.shape),
        input=tensor.input,
        output=tensor.output or None,
    )
