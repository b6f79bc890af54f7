"""What a timeline costs: `khvdrun -np 2 python benchmarks/timeline_cost.py`.

Runs allreduces of 4 B and of 1 MiB at the C API, one behind the other, and turns the
timeline on and off in turns. Prints the medians of both, and how their times relate.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time

import keras_hvd
from keras_hvd import native

SIZES = {"4 B": 4, "1 MiB": 1 << 20}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn")
    parser.add_argument("--rounds", type=int, default=16, help="of two turns each")
    options = parser.parse_args()
    keras_hvd.init()
    for name, size in SIZES.items():
        measure(name, size, options)


def measure(name: str, size: int, options: argparse.Namespace) -> None:
    """Takes turns, and prints what came out."""
    request = Request(size)
    calls = calls_in(request, options.seconds)
    # The second half of each round goes the other way: what drifts cancels out.
    turns = {False: [], True: []}
    for number in range(options.rounds):
        for is_on in (False, True) if number % 2 == 0 else (True, False):
            turns[is_on].append(turn(request, calls, is_on))
    if keras_hvd.rank() != 0:
        return
    off, on = (statistics.median(turns[is_on]) * 1e6 for is_on in (False, True))
    ratios = [one / other - 1 for one, other in zip(turns[True], turns[False])]
    print(
        f"{name}: off {off:.2f} us, on {on:.2f} us ({on / off - 1:+.1%}); "
        f"median of {len(ratios)} pairs {statistics.median(ratios):+.1%}",
        flush=True,
    )


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
        """Runs it so often; returns the seconds that one took."""
        run, reference = native.engine().khvd_run, ctypes.byref(self._request)
        start = time.perf_counter()
        for _ in range(calls):
            code = run(reference)
        assert code == 0, native.engine().khvd_last_error().decode()
        return (time.perf_counter() - start) / calls


def calls_in(request: Request, seconds: float) -> int:
    """How many calls take about so long: the same number on all ranks."""
    request.run(200)
    return int(keras_hvd.broadcast_object(1 + seconds / request.run(200), 0))


def turn(request: Request, calls: int, is_on: bool) -> float:
    """Seconds that a call takes with the timeline on, or off."""
    with tempfile.NamedTemporaryFile() as file:
        if is_on:
            keras_hvd.start_timeline(file.name)
        request.run(calls // 20 + 1)
        seconds = request.run(calls)
        keras_hvd.stop_timeline()
    return seconds


if __name__ == "__main__":
    main()
