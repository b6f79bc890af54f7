"""The cost of a timeline: `khvdrun -np 2 python benchmarks/timeline_cost.py`.

Runs allreduces of 4 B and of 1 MiB at the C API, one behind the other, and turns the
timeline on and off in turns. Prints the medians of both, and how their times relate.
With `--recording` it is the recording of khvdrun's `--report`, and the ranks join a new
job for each turn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from repeated_allreduce import Request

import keras_hvd
from keras_hvd.recording import files, rank_records

SIZES = {"4 B": 4, "1 MiB": 1 << 20}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn")
    parser.add_argument("--rounds", type=int, default=16, help="of two turns each")
    parser.add_argument(
        "--recording", action="store_true", help="what --report records"
    )
    options = parser.parse_args()
    keras_hvd.init()
    for name, size in SIZES.items():
        measure(name, size, options)


def measure(name: str, size: int, options: argparse.Namespace) -> None:
    """Takes turns, and prints the results."""
    request = Request(size)
    calls = calls_in(request, options.seconds)
    # The second half of each round goes the other way, so that drift cancels out.
    turns = {False: [], True: []}
    for number in range(options.rounds):
        for is_on in (False, True) if number % 2 == 0 else (True, False):
            turns[is_on].append(turn(request, calls, is_on, options.recording))
    if keras_hvd.rank() != 0:
        return
    off, on = (statistics.median(turns[is_on]) * 1e6 for is_on in (False, True))
    ratios = [one / other - 1 for one, other in zip(turns[True], turns[False])]
    print(
        f"{name}: off {off:.2f} us, on {on:.2f} us ({on / off - 1:+.1%}); "
        f"median of {len(ratios)} pairs {statistics.median(ratios):+.1%}",
        flush=True,
    )


def calls_in(request: Request, seconds: float) -> int:
    """The number of calls that take about `seconds`, the same on all ranks."""
    request.run(200)
    return int(keras_hvd.broadcast_object(1 + seconds / request.run(200), 0))


def turn(request: Request, calls: int, is_on: bool, records: bool) -> float:
    """Seconds that a call takes with the timeline, or the recording, on or off."""
    with _recording(is_on) if records else _timeline(is_on):
        request.run(calls // 20 + 1)
        return request.run(calls)


@contextlib.contextmanager
def _timeline(is_on: bool) -> Iterator[None]:
    with tempfile.NamedTemporaryFile() as file:
        if is_on:
            keras_hvd.start_timeline(file.name)
        yield
        keras_hvd.stop_timeline()


@contextlib.contextmanager
def _recording(is_on: bool) -> Iterator[None]:
    keras_hvd.shutdown()
    with tempfile.TemporaryDirectory() as folder:
        if is_on:
            rank_records.create(
                Path(folder, files.RANKS), int(os.environ["KERAS_HVD_LOCAL_SIZE"])
            )
            os.environ["KERAS_HVD_REPORT"] = folder
        keras_hvd.init()
        yield
        os.environ.pop("KERAS_HVD_REPORT", None)


if __name__ == "__main__":
    main()
