"""A rank's engine at its C API, with tensors on a GPU and calls timed from C."""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import rank

# CUDA and the C API as the tests reach them, behind this folder's own modules.
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "gpu" / "ranks"))
import cuda  # noqa: E402
from engine import Arena, Dtype, Engine, Kind, Op, Tensor  # noqa: E402

from keras_hvd.job import native  # noqa: E402


class StreamEnd(ctypes.Structure):
    """stream_end of timed_gpu_calls.c."""

    _fields_ = [
        ("record", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("event", ctypes.c_void_p),
    ]


def parser() -> argparse.ArgumentParser:
    """A parser of the arguments that `jobs.gpu` gives a rank."""
    arguments = rank.parser()
    for name in ("timed-calls", "engine", "cuda", "nccl", "job"):
        arguments.add_argument(f"--{name}", required=True)
    for name in ("rank", "size", "device"):
        arguments.add_argument(f"--{name}", type=int, required=True)
    arguments.add_argument("--version", required=True, help="for the table")
    return arguments


class GpuRank:
    """The engine in its job, a stream, and memory for tensors.

    Args:
        options: as `parser` reads them.
        size: of the memory, in bytes.
    """

    def __init__(self, options: argparse.Namespace, size: int):
        # Before the engine counts its cores.
        rank.bind(options.cores, options.rank)
        self.gpu = cuda.Gpu(options.cuda, options.device)
        self.end = StreamEnd(
            *self.gpu.addresses("cuEventRecord", "cuEventQuery"), self.gpu.new_event()
        )
        self.timed = ctypes.CDLL(options.timed_calls)
        self.arena = Arena(self.gpu, size)
        self.stream = self.gpu.new_stream()
        self.engine = Engine(
            options.engine,
            self.gpu,
            self.arena,
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

    def memory(self, elements: Sequence[int]) -> list[int]:
        """The addresses of zeros, whose sums stay zeros."""
        addresses = [self.arena.take(4 * count) for count in elements]
        for address, count in zip(addresses, elements):
            self.gpu.fill(address, 0, 4 * count, self.stream)
        self.gpu.synchronize(self.stream)
        return addresses

    def request(
        self, name: str, addresses: Sequence[int], elements: Sequence[int]
    ) -> native.Request:
        """A sum of tensors of float32, in place."""
        tensors = [
            Tensor(Dtype.FLOAT32, (count,), address, address)
            for address, count in zip(addresses, elements)
        ]
        return self.engine.request(
            Kind.ALLREDUCE, name, tensors, self.stream, reduce_op=Op.SUM
        )

    def seconds(
        self,
        request: native.Request,
        repeats: int,
        in_a_row: int,
    ) -> tuple[list[float], list[float]]:
        """The seconds of each row until all was enqueued, and until it had ended."""
        host, whole = (ctypes.c_double * repeats)(), (ctypes.c_double * repeats)()
        code = self.timed.time_khvd_on_gpu(
            self.engine.library.khvd_submit_and_drive,
            ctypes.byref(request),
            ctypes.byref(self.end),
            *(repeats, in_a_row, host, whole),
        )
        self.engine.check(code)
        return list(host), list(whole)

    def close(self) -> None:
        """Leaves the job, and gives all back."""
        self.engine.shutdown()
        self.arena.close()
        self.gpu.close()


def serve(options: argparse.Namespace, measure: Callable[..., dict]) -> None:
    """Answers the benchmark's commands until there are no more.

    Args:
        options: as `parser` reads them.
        measure: takes the fields of a command, returns those of the answer.
    """
    session = rank.Session(options.socket, options.rank, options.size, options.version)
    while (command := session.command()) is not None:
        try:
            session.reply(**measure(**command))
        except Exception as error:
            session.reply(error=f"{type(error).__name__}: {error}")
            raise
