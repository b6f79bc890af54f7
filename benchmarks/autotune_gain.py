"""The gain of autotuning: `python benchmarks/autotune_gain.py -np 2`.

For allreduces of several sizes: a job tunes itself and leaves a log. Then jobs that
start from it and jobs without autotuning run in turns. Prints the medians of both, and
how their times relate. With `--hosts 4 --rate 1gbit --delay 2` the ranks are on hosts
that are network namespaces of this machine; only root can run that.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from repeated_allreduce import Request

import keras_hvd

SIZES = [32 << 10, 8 << 20]
# More than a search takes, and than a comparison does: seconds, of samples of 20 ms at
# least, and calls, of samples of ten.
SEARCH = 15.0, 2000
COMPARISON = 1.0, 400
ON_HOSTS = Path(__file__).resolve().parents[1] / "tests" / "on_hosts.py"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-np", dest="ranks", type=int, default=2, help="of each host")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--rate", default="", help="of a host's cable, as 1gbit")
    parser.add_argument("--delay", type=float, default=0, help="in milliseconds")
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--rank", nargs=3, metavar=("BYTES", "SECONDS", "CALLS"))
    options = parser.parse_args()
    if options.rank:
        size, seconds, calls = options.rank
        return be_rank(int(size), float(seconds), int(calls))
    for size in options.bytes:
        compare(size, options)


def compare(size: int, options: argparse.Namespace) -> None:
    """Takes turns, and prints what came out."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "autotune.csv"
        tuned = {"KERAS_HVD_AUTOTUNE": "1", "KERAS_HVD_AUTOTUNE_LOG": str(log)}
        run_job(options, size, SEARCH, tuned)
        head, _, best = log.read_text().splitlines()[:3]
        assert head.endswith("state=result"), "the search took longer than expected"
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(options.pairs):
            for is_tuned in (False, True) if number % 2 == 0 else (True, False):
                given = tuned if is_tuned else {}
                one = run_job(options, size, COMPARISON, given)
                times[is_tuned].append(one)
    off, on = (statistics.median(times[is_on]) * 1e6 for is_on in (False, True))
    ratios = [one / other - 1 for one, other in zip(times[True], times[False])]
    print(
        f"{size} B: defaults {off:.2f} us, tuned {on:.2f} us; median of "
        f"{len(ratios)} pairs {statistics.median(ratios):+.1%}; found {best}",
        flush=True,
    )


def run_job(
    options: argparse.Namespace,
    size: int,
    before: tuple[float, int],
    variables: dict[str, str],
) -> float:
    """Seconds that an allreduce takes, after seconds and calls that do not count."""
    if options.hosts == 1:
        place = ["-m", "keras_hvd.launch", "-np", str(options.ranks)]
    else:
        network = ["--rate", options.rate, "--delay", str(options.delay)]
        place = [str(ON_HOSTS), *network, *[str(options.ranks)] * options.hosts]
    script = [sys.executable, __file__, "--rank", str(size), *map(str, before)]
    output = subprocess.run(
        [sys.executable, *place, *script],
        env={**os.environ, **variables},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return float(re.findall(r"took (\S+) s", output)[0])


def be_rank(size: int, seconds: float, calls: int) -> None:
    """Runs allreduces that do not count, and then measures some."""
    keras_hvd.init()
    request = Request(size)
    request.run(20)
    each = request.run(20)
    request.run(max(calls, calls_in(seconds, each)))
    taken = request.run(calls_in(0.5, each))
    if keras_hvd.rank() == 0:
        print(f"took {taken} s")


def calls_in(seconds: float, each: float) -> int:
    """How many calls take about so long: the same number on all ranks."""
    return int(keras_hvd.broadcast_object(1 + seconds / each, 0))


if __name__ == "__main__":
    main()
