"""A rank of gpu_allreduce.py: the engine at its C API and bare NCCL, on one GPU.

Both reduce the same memory, on the same stream, in turn.
"""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path

import bare_nccl
import rank
from workloads import WORKLOADS

# CUDA and the C API as the tests reach them, behind this folder's own modules.
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "gpu" / "ranks"))
import cuda  # noqa: E402
from engine import Arena, Dtype, Engine, Kind, Op, Tensor  # noqa: E402


class StreamEnd(ctypes.Structure):
    """stream_end of timed_gpu_calls.c."""

    _fields_ = [
        ("record", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("event", ctypes.c_void_p),
    ]


class Contender:
    """The engine and NCCL, in a job of their own.

    Args:
        options: as `main` reads them.
    """

    def __init__(self, options):
        self._options = options
        self._gpu = cuda.Gpu(options.cuda, options.device)
        self._end = StreamEnd(
            *self._gpu.addresses("cuEventRecord", "cuEventQuery"), self._gpu.new_event()
        )
        self._timed = ctypes.CDLL(options.timed_calls)
        most = max(options.most, options.chunk_bytes + total_bytes())
        self._arena = Arena(self._gpu, most + (1 << 20))
        self._stream = self._gpu.new_stream()
        self._engine = Engine(
            options.engine,
            self._gpu,
            self._arena,
            rank=options.rank,
            size=options.size,
            local_rank=options.rank,
            local_size=options.size,
            cross_size=1,
            job=options.job.encode(),
            # One request is one batch, as it is one group of NCCL's.
            fusion_bytes=1 << 40,
            cuda_library=options.cuda.encode(),
            nccl_library=options.nccl.encode(),
        )
        self._nccl = bare_nccl.Library(options.nccl)
        self._communicator: ctypes.c_void_p | None = None

    def measure(self, variant: str, **command) -> dict:
        """Does what the benchmark asks for."""
        return getattr(self, variant)(**command)

    def new_id(self) -> dict:
        """What the ranks' NCCL finds each other by; rank 0's counts."""
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
        addresses = self._memory(elements)
        call = self._engine_call if who == "engine" else self._nccl_call
        if warm_up:
            call(addresses, elements, warm_up, in_a_row)
        host, whole = call(addresses, elements, repeats, in_a_row)
        return {"host": host, "whole": whole}

    def backprop(self, who: str, chunks: int, chunk_bytes: int) -> dict:
        """Has a stream busy, as backprop has it, and gradients leave it on the way.

        Memory is set chunk by chunk; behind each chunk a part of ResNet-50's gradients
        is reduced, which the next chunk does not wait for.

        Returns:
            The seconds, from the start of the first chunk on the GPU: `computed`, when
            each chunk ended, and `reduced`, when each collective did.
        """
        self._arena.clear()
        workspace = self._arena.take(chunk_bytes)
        elements = [math.prod(shape) for shape in reversed(WORKLOADS["resnet50"])]
        buckets = [elements[each::chunks] for each in range(chunks)]
        tensors = [list(map(self._take, bucket)) for bucket in buckets]
        behind = self._gpu.new_stream()
        start = self._gpu.new_event(timed=True)
        computed = [self._gpu.new_event(timed=True) for _ in buckets]
        reduced = [self._gpu.new_event(timed=True) for _ in buckets]
        self._gpu.record(start, self._stream)
        pending = []
        for number, (addresses, sizes) in enumerate(zip(tensors, buckets)):
            self._gpu.fill(workspace, number, chunk_bytes, self._stream)
            self._gpu.record(computed[number], self._stream)
            if who == "engine":
                pending.append(self._begin(f"bucket {number}", addresses, sizes))
            elif who == "nccl":
                self._gpu.wait(behind, computed[number])
                self._group(addresses, sizes, behind)
                self._gpu.record(reduced[number], behind)
        for number, each in enumerate(pending):
            each.wait_on(behind)
            self._gpu.record(reduced[number], behind)
        self._gpu.synchronize(behind)
        self._gpu.synchronize(self._stream)
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
        self._engine.shutdown()
        self._arena.close()
        self._gpu.close()

    def _take(self, elements: int) -> int:
        return self._arena.take(4 * elements)

    def _memory(self, elements: list[int]) -> list[int]:
        """Zeros, of which sums stay zeros."""
        self._arena.clear()
        addresses = list(map(self._take, elements))
        for address, count in zip(addresses, elements):
            self._gpu.fill(address, 0, 4 * count, self._stream)
        self._gpu.synchronize(self._stream)
        return addresses

    def _require_sum(self, who: str) -> None:
        """What was measured must have been an allreduce."""
        (address,) = self._memory([1024])
        memory = self._gpu.allocate_host(4096)
        numbers = memory.view("float32")
        numbers[:] = self._options.rank + 1
        self._gpu.copy_to_device(address, memory, self._stream)
        call = self._engine_call if who == "engine" else self._nccl_call
        call([address], [1024], 1, 1)
        self._gpu.copy_to_host(memory, address, self._stream)
        self._gpu.synchronize(self._stream)
        expected = self._options.size * (self._options.size + 1) / 2
        if not (numbers == expected).all():
            raise ValueError(f"wrong sum of {who}: {numbers[:4]}, not {expected}")
        self._gpu.free_host(memory)

    def _begin(self, name: str, addresses: list[int], elements: list[int]):
        tensors = [
            Tensor(Dtype.FLOAT32, (count,), address, address)
            for address, count in zip(addresses, elements)
        ]
        fields = {"reduce_op": Op.SUM, "with_end": True}
        return self._engine.submit(
            Kind.ALLREDUCE, name, tensors, self._stream, **fields
        )

    def _engine_call(
        self, addresses: list[int], elements: list[int], repeats: int, in_a_row: int
    ) -> tuple[list[float], list[float]]:
        tensors = [
            Tensor(Dtype.FLOAT32, (count,), address, address)
            for address, count in zip(addresses, elements)
        ]
        name = f"{len(elements)} of {sum(elements)}"
        fields = {"reduce_op": Op.SUM}
        request = self._engine.request(
            Kind.ALLREDUCE, name, tensors, self._stream, **fields
        )
        host, whole = (ctypes.c_double * repeats)(), (ctypes.c_double * repeats)()
        code = self._timed.time_khvd_on_gpu(
            self._engine.library.khvd_submit,
            ctypes.byref(request),
            ctypes.byref(self._end),
            *(repeats, in_a_row, host, whole),
        )
        self._require(code, "the engine")
        return list(host), list(whole)

    def _nccl_call(
        self, addresses: list[int], elements: list[int], repeats: int, in_a_row: int
    ) -> tuple[list[float], list[float]]:
        calls = self._nccl.calls(self._communicator, addresses, elements)
        host, whole = (ctypes.c_double * repeats)(), (ctypes.c_double * repeats)()
        code = self._timed.time_nccl(
            ctypes.byref(calls),
            ctypes.c_void_p(self._stream),
            ctypes.byref(self._end),
            *(repeats, in_a_row, host, whole),
        )
        self._require(code, "NCCL")
        return list(host), list(whole)

    def _group(self, addresses: list[int], elements: list[int], stream: int) -> None:
        """One group, enqueued and not waited for."""
        calls = self._nccl.calls(self._communicator, addresses, elements)
        self._require(
            self._timed.enqueue_nccl(ctypes.byref(calls), ctypes.c_void_p(stream)),
            "NCCL",
        )

    def _require(self, code: int, who: str) -> None:
        if code != 0:
            text = self._engine.library.khvd_last_error().decode()
            raise RuntimeError(f"{who} failed with code {code}: {text}")


def total_bytes() -> int:
    """Of ResNet-50's gradients, each rounded up as an arena does."""
    return sum(4 * math.prod(shape) + 256 for shape in WORKLOADS["resnet50"])


def main() -> None:
    parser = rank.parser()
    for name in ("timed-calls", "engine", "cuda", "nccl", "job"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("rank", "size", "device", "most", "chunk-bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--version", required=True, help="for the table")
    options = parser.parse_args()
    contender = Contender(options)
    session = rank.Session(options.socket, options.rank, options.size, options.version)
    while (command := session.command()) is not None:
        try:
            session.reply(**contender.measure(**command))
        except Exception as error:
            session.reply(error=f"{type(error).__name__}: {error}")
            raise
    contender.close()


if __name__ == "__main__":
    main()
