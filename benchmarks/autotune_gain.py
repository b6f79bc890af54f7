"""What autotuning gives: `python benchmarks/autotune_gain.py -np 2`.

For allreduces of several sizes: a job tunes itself and leaves a log. Then jobs that
start from it and jobs without autotuning run in turns. Prints the medians of both, and
how their times relate.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from repeated_allreduce import Request

import keras_hvd

SIZES = {"32 KiB": 32 << 10, "8 MiB": 8 << 20}
# More than a search takes of samples, and than a comparison does, of 20 ms at least.
SEARCH_SECONDS = 6.0
COMPARISON_SECONDS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-np", dest="ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--rank", nargs=3, metavar=("BYTES", "BEFORE", "SECONDS"))
    options = parser.parse_args()
    if options.rank:
        size, before, seconds = options.rank
        return be_rank(int(size), float(before), float(seconds))
    for name, size in SIZES.items():
        compare(name, size, options)


def compare(name: str, size: int, options: argparse.Namespace) -> None:
    """Takes turns, and prints what came out."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "autotune.csv"
        tuned = ("--autotune", "--autotune-log-file", str(log))
        run_job(options.ranks, size, SEARCH_SECONDS, *tuned)
        head, _, best = log.read_text().splitlines()[:3]
        assert head.endswith("state=result"), "the search took longer than expected"
        times = {True: [], False: []}
        for number in range(options.pairs):
            for is_tuned in (False, True) if number % 2 == 0 else (True, False):
                given = tuned if is_tuned else ()
                one = run_job(options.ranks, size, COMPARISON_SECONDS, *given)
                times[is_tuned].append(one)
    off, on = (statistics.median(times[is_on]) * 1e6 for is_on in (False, True))
    ratios = [one / other - 1 for one, other in zip(times[True], times[False])]
    print(
        f"{name}: defaults {off:.2f} us, tuned {on:.2f} us; median of "
        f"{len(ratios)} pairs {statistics.median(ratios):+.1%}; found {best}",
        flush=True,
    )


def run_job(ranks: int, size: int, before: float, *options: str) -> float:
    """Seconds that an allreduce takes, once `before` are over."""
    place = [sys.executable, "-m", "keras_hvd.launch", "-np", str(ranks), "--no-prefix"]
    script = [sys.executable, __file__, "--rank", str(size), str(before), "0.5"]
    command = [*place, *options, *script]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def be_rank(size: int, before: float, seconds: float) -> None:
    """Runs allreduces, without and with looking at the time."""
    keras_hvd.init()
    request = Request(size)
    each = request.run(200)
    request.run(calls_in(before, each))
    taken = request.run(calls_in(seconds, each))
    if keras_hvd.rank() == 0:
        print(taken)


def calls_in(seconds: float, each: float) -> int:
    """How many calls take about so long: the same number on all ranks."""
    return int(keras_hvd.broadcast_object(1 + seconds / each, 0))


if __name__ == "__main__":
    main()
