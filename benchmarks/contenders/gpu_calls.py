"""A rank of gpu_calls.py: the engine over a CUDA and an NCCL that do nothing."""

from __future__ import annotations

import argparse
import ctypes
import math

import gpu_rank
from workloads import WORKLOADS, total_bytes

SHAPES = {"4 B": [[1]], "161 tensors": WORKLOADS["resnet50"]}


class DriverCalls(ctypes.Structure):
    """null_cuda_counts of null_cuda.c."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("pushes", "waits", "creations", "records")
    ]


class Contender:
    """The engine, and the tensors that it reduces.

    Args:
        options: as `main` reads them.
    """

    def __init__(self, options: argparse.Namespace):
        most = sum(
            total_bytes(shapes) + 256 * len(shapes) for shapes in SHAPES.values()
        )
        self._rank = gpu_rank.GpuRank(options, most)
        driver = ctypes.CDLL(options.cuda)
        self._driver_calls = DriverCalls.in_dll(driver, "null_cuda_counted")
        self._requests = {
            what: self._request(what, [math.prod(shape) for shape in shapes])
            for what, shapes in SHAPES.items()
        }

    def measure(self, what: str, rows: int, calls: int) -> dict:
        """Reduces again and again.

        Args:
            what: a key of `SHAPES`.
            rows: how often to measure, after one row that is not.
            calls: of a row; each begins when the one before is enqueued.

        Returns:
            `rows`: for each the seconds of a call, and the engine's counts for it.
        """
        self._row(what, calls)
        return {"rows": [self._row(what, calls) for _ in range(rows)]}

    def close(self) -> None:
        """Leaves the job."""
        self._rank.close()

    def _request(self, what: str, elements: list[int]):
        return self._rank.request(what, self._rank.memory(elements), elements)

    def _row(self, what: str, calls: int) -> dict[str, float]:
        before = self._counts()
        (seconds,), _ = self._rank.seconds(self._requests[what], 1, calls)
        counts = {name: count - before[name] for name, count in self._counts().items()}
        # The row's end is the benchmark's own.
        counts["records"] -= 1
        return {
            "seconds": seconds / calls,
            **{name: count / calls for name, count in counts.items()},
        }

    def _counts(self) -> dict[str, int]:
        names = [name for name, _ in DriverCalls._fields_]
        return {
            "sleeps": self._rank.engine.counters().sleeps,
            **{name: getattr(self._driver_calls, name) for name in names},
        }


def main() -> None:
    options = gpu_rank.parser().parse_args()
    contender = Contender(options)
    gpu_rank.serve(options, contender.measure)
    contender.close()


if __name__ == "__main__":
    main()
