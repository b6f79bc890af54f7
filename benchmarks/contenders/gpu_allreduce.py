"""A rank of gpu_allreduce.py: the engine at its C API and bare NCCL, on one GPU.

Both reduce the same memory, on the same stream, in turn.
"""

from __future__ import annotations

import argparse
import ctypes
import math

import bare_nccl
import gpu_rank
from workloads import WORKLOADS

from keras_hvd.job import native


class BusyWork(ctypes.Structure):
    """busy_work of timed_gpu_calls.c."""

    _fields_ = [
        ("record", ctypes.c_void_p),
        ("wait", ctypes.c_void_p),
        ("fill", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("behind", ctypes.c_void_p),
        ("memory", ctypes.c_uint64),
        ("bytes", ctypes.c_size_t),
        ("parts", ctypes.c_int32),
        ("start", ctypes.c_void_p),
        ("computed", ctypes.POINTER(ctypes.c_void_p)),
        ("reduced", ctypes.POINTER(ctypes.c_void_p)),
        ("codes", ctypes.POINTER(ctypes.c_int32)),
    ]


class Contender:
    """The engine and NCCL, in a job of their own.

    Args:
        options: as `main` reads them.
    """

    def __init__(self, options: argparse.Namespace):
        self._options = options
        most = max(options.most, options.chunk_bytes + total_bytes())
        self._rank = gpu_rank.GpuRank(options, most + (1 << 20))
        self._gpu, self._arena = self._rank.gpu, self._rank.arena
        self._nccl = bare_nccl.Library(options.nccl)
        self._communicator: ctypes.c_void_p | None = None

    def measure(self, variant: str, **command) -> dict:
        """Calls the method that the benchmark asks for."""
        return getattr(self, variant)(**command)

    def new_id(self) -> dict:
        """An ID by which the ranks' NCCL find each other; rank 0's counts."""
        return {"id": self._nccl.new_id().hex()}

    def connect(self, unique_id: str) -> dict:
        """Makes the communicator of bare NCCL, and checks that both contenders sum."""
        self._communicator = self._nccl.connect(
            bytes.fromhex(unique_id), self._options.rank, self._options.size
        )
        for who in ("engine", "nccl"):
            self._require_sum(who)
        return {}

    def reduce(
        self, who: str, elements: list[int], repeats: int, in_a_row: int, warm_up: int
    ) -> dict:
        """Times rows of allreduces of tensors of these sizes, as one group each."""
        self._arena.clear()
        addresses = self._rank.memory(elements)
        call = self._engine_call if who == "engine" else self._nccl_call
        if warm_up:
            call(addresses, elements, warm_up, in_a_row)
        host, whole = call(addresses, elements, repeats, in_a_row)
        return {"host": host, "whole": whole}

    def backprop(self, who: str, chunks: int, chunk_bytes: int) -> dict:
        """Keeps a stream busy, as backprop does, and reduces gradients on the way.

        Memory is set chunk by chunk; behind each chunk a part of ResNet-50's gradients
        is reduced, which the next chunk does not wait for. All calls are prepared
        before the first one is made, from C.

        Returns:
            The seconds, from the start of the first chunk on the GPU: `computed`, when
            each chunk ended, and `reduced`, when each collective did.
        """
        self._arena.clear()
        workspace = self._arena.take(chunk_bytes)
        elements = [math.prod(shape) for shape in reversed(WORKLOADS["resnet50"])]
        parts = [elements[each::chunks] for each in range(chunks)]
        calls = [(self._rank.memory(part), part) for part in parts]
        behind = self._gpu.new_stream()
        start = self._gpu.new_event(timed=True)
        computed = [self._gpu.new_event(timed=True) for _ in parts]
        reduced = [self._gpu.new_event(timed=True) for _ in parts]
        handles = ctypes.c_void_p * chunks
        work = BusyWork(
            *self._gpu.addresses("cuEventRecord", "cuStreamWaitEvent"),
            *self._gpu.addresses("cuMemsetD8Async"),
            *(self._rank.stream, behind, workspace, chunk_bytes, chunks, start),
            *(handles(*computed), handles(*reduced), (ctypes.c_int32 * chunks)()),
        )
        self._run_work(who, work, calls)
        self._gpu.synchronize(behind)
        self._gpu.synchronize(self._rank.stream)
        ends = {"computed": computed, "reduced": reduced if who != "nothing" else []}
        times = {
            name: [self._gpu.seconds_between(start, event) for event in events]
            for name, events in ends.items()
        }
        for event in (start, *computed, *reduced):
            self._gpu.destroy_event(event)
        self._gpu.destroy_stream(behind)
        return times

    def close(self) -> None:
        """Gives all back."""
        if self._communicator is not None:
            self._nccl.destroy(self._communicator)
        self._rank.close()

    def _require_sum(self, who: str) -> None:
        """Raises an error if a contender's result is not the sum over all ranks."""
        self._arena.clear()
        (address,) = self._rank.memory([1024])
        memory = self._gpu.allocate_host(4096)
        numbers = memory.view("float32")
        numbers[:] = self._options.rank + 1
        self._gpu.copy_to_device(address, memory, self._rank.stream)
        call = self._engine_call if who == "engine" else self._nccl_call
        call([address], [1024], 1, 1)
        self._gpu.copy_to_host(memory, address, self._rank.stream)
        self._gpu.synchronize(self._rank.stream)
        expected = self._options.size * (self._options.size + 1) / 2
        if not (numbers == expected).all():
            raise ValueError(f"wrong sum of {who}: {numbers[:4]}, not {expected}")
        self._gpu.free_host(memory)

    def _engine_call(
        self, addresses: list[int], elements: list[int], repeats: int, in_a_row: int
    ) -> tuple[list[float], list[float]]:
        name = f"{len(elements)} of {sum(elements)}"
        request = self._rank.request(name, addresses, elements)
        return self._rank.seconds(request, repeats, in_a_row)

    def _nccl_call(
        self, addresses: list[int], elements: list[int], repeats: int, in_a_row: int
    ) -> tuple[list[float], list[float]]:
        calls = self._nccl.calls(self._communicator, addresses, elements)
        host, whole = (ctypes.c_double * repeats)(), (ctypes.c_double * repeats)()
        code = self._rank.timed.time_nccl(
            ctypes.byref(calls),
            ctypes.c_void_p(self._rank.stream),
            ctypes.byref(self._rank.end),
            *(repeats, in_a_row, host, whole),
        )
        require(code, "NCCL")
        return list(host), list(whole)

    def _run_work(
        self, who: str, work: BusyWork, calls: list[tuple[list[int], list[int]]]
    ) -> None:
        timed, given = self._rank.timed, ctypes.byref(work)
        if who == "nothing":
            require(timed.run_work(given), "CUDA")
        elif who == "nccl":
            groups = [self._nccl.calls(self._communicator, *call) for call in calls]
            array = (bare_nccl.Calls * len(groups))(*groups)
            require(timed.run_work_and_nccl(given, array), "NCCL")
        else:
            requests = [
                self._rank.request(f"part {part}", *call)
                for part, call in enumerate(calls)
            ]
            for request in requests:
                request.end = ctypes.pointer(ctypes.c_void_p())
            pointers = (ctypes.POINTER(native.Request) * len(requests))(
                *map(ctypes.pointer, requests)
            )
            library = self._rank.engine.library
            self._rank.engine.check(
                timed.run_work_and_khvd(
                    given,
                    library.khvd_submit_and_drive,
                    library.khvd_await_end,
                    pointers,
                )
            )


def require(code: int, who: str) -> None:
    """Raises an error for a failed call of CUDA or NCCL."""
    if code != 0:
        raise RuntimeError(f"{who} failed with code {code}")


def total_bytes() -> int:
    """The bytes of ResNet-50's gradients, each rounded up as an arena does."""
    return sum(4 * math.prod(shape) + 256 for shape in WORKLOADS["resnet50"])


def main() -> None:
    parser = gpu_rank.parser()
    for name in ("most", "chunk-bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    contender = Contender(options)
    gpu_rank.serve(options, contender.measure)
    contender.close()


if __name__ == "__main__":
    main()
