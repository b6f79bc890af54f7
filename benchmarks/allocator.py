"""What TensorFlow's allocator costs: `python benchmarks/allocator.py`.

Runs collectives and steps of training under several allocators, each in processes of
its own, in turn, and shows the time of a call, its page faults, and the memory of a
rank, which grows where an allocator scatters what it keeps. `--without-onednn` is for
processors on which TensorFlow has a pool by itself. Prints tables, writes JSON and a
plot.
"""

from __future__ import annotations

import argparse
import ctypes.util
import statistics
from collections.abc import Mapping

import environments
import jobs
import measurement
import plots
import tables
from measurement import summary
from tables import Check, Table, spread

UNCHANGED, POOL, C_API = "unchanged", "pool", "C API"
# The C library's allocator, told to keep freed memory. With arenas of threads it would
# give it back.
_ONE_ARENA = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_ARENA_MAX": "1",
}
# The variables in the ranks' environment, for each allocator.
ALLOCATORS = {
    UNCHANGED: {"KERAS_HVD_ALLOCATOR": "unchanged"},
    POOL: {"KERAS_HVD_ALLOCATOR": "pool"},
    "huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "one arena": _ONE_ARENA,
    "tcmalloc": {"LD_PRELOAD": ctypes.util.find_library("tcmalloc_minimal") or ""},
}
# How many ranks, and how many calls of a turn.
WORKLOADS = {
    "allreduce/1": (2, 200),
    "allreduce/16": (2, 40),
    "allreduce/64": (2, 10),
    "gradients": (2, 10),
    "cnn": (1, 10),
    "mlp": (1, 3),
    "embedding": (1, 10),
    "transformer": (1, 150),
    "elements": (1, 20),
}
WANTED_RATIO = 1.3

# workload: allocator: "seconds" (a summary), "faults" of a call, and of a rank's memory
# "first", "last" and "peak", in bytes
Measured = dict[str, dict[str, dict]]


def main() -> None:
    measurement.end_on_sigterm()
    options = arguments()
    measured, versions = {}, {}
    for workload in options.workloads:
        measured[workload], versions["keras_hvd"] = measure(workload, options)
    checks = requirements(measured)
    result = {
        "benchmark": "allocator",
        "machine": options.machine,
        "versions": versions,
        "settings": {
            "rounds": options.rounds,
            "without_onednn": options.without_onednn,
        },
        "measured": measured,
        "checks": checks,
        "tables": [table(measured), tables.check_table(checks)],
    }
    tables.publish(options.output, result)
    plots.bars(
        options.output / "allocator.svg",
        "seconds a call",
        {
            workload: {name: found["seconds"] for name, found in row.items()}
            for workload, row in measured.items()
        },
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measurement.add_output_argument(parser)
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each allocator (default: 5)"
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS)
    )
    names = [name for name in ALLOCATORS if all(ALLOCATORS[name].values())]
    parser.add_argument(
        "--allocators",
        nargs="+",
        choices=names,
        default=names,
        help=f"default: those that are installed here, {', '.join(names)}",
    )
    parser.add_argument(
        "--without-onednn",
        action="store_true",
        help="have TensorFlow leave oneDNN, and its pool with it",
    )
    options = parser.parse_args()
    options.machine = measurement.machine()
    return options


def measure(workload: str, options: argparse.Namespace) -> tuple[dict[str, dict], str]:
    """Runs a workload under each allocator, and asks them in turn."""
    calls = WORKLOADS[workload][1]
    running: dict[str, measurement.Job] = {}
    answers: dict[str, list[dict]] = {}
    try:
        for name in options.allocators:
            running[name] = start(workload, ALLOCATORS[name], options)
        kind, _, size = workload.partition("/")
        if kind == "allreduce":
            running[C_API] = start(f"c_api/{size}", ALLOCATORS[UNCHANGED], options)
        for name, job in running.items():
            answers[name] = job.ask(repeats=max(3, calls // 10))[:1]
        for _ in range(options.rounds):
            for name, job in running.items():
                answers[name] += job.ask(repeats=calls)[:1]
        version = next(iter(running.values())).version
    finally:
        for job in running.values():
            job.close()
    return {name: figures(*found) for name, found in answers.items()}, version


def start(
    workload: str, variables: Mapping[str, str], options: argparse.Namespace
) -> measurement.Job:
    onednn = {"TF_ENABLE_ONEDNN_OPTS": "0"} if options.without_onednn else {}
    return jobs.keras_hvd(
        "allocator.py",
        WORKLOADS[workload.replace("c_api", "allreduce")][0],
        *("--workload", workload),
        *("--timed-calls", environments.compiled("timed_calls.c")),
        variables={**variables, **onednn},
    )


def figures(first: dict, *turns: dict) -> dict:
    """The figures of rank 0's answers; of the first one only its memory counts."""
    return {
        "seconds": summary([each for turn in turns for each in turn["seconds"]]),
        "faults": statistics.median(turn["faults"] for turn in turns),
        "first": first["resident"],
        "last": turns[-1]["resident"],
        "peak": turns[-1]["peak"],
    }


def requirements(measured: Measured) -> list[Check]:
    """The requirements on keras_hvd, checked against the figures."""
    checks = []
    for workload, row in measured.items():
        if POOL in row and C_API in row:
            medians = (row[name]["seconds"]["median"] for name in (POOL, C_API))
            pool, c_api = medians
            what = f"{workload} MiB in a tf.function, pool: against the C API"
            checks.append(Check(what, pool / c_api, WANTED_RATIO, False, "x"))
    return checks


def table(measured: Measured) -> Table:
    rows = [
        [
            *(workload, name, spread(found["seconds"]), f"{found['faults']:.0f}"),
            *(f"{found[when] >> 20} MiB" for when in ("first", "last", "peak")),
        ]
        for workload, row in measured.items()
        for name, found in row.items()
    ]
    header = ["workload", "allocator", "a call", "page faults"]
    header += ["memory at first", "at last", "at most"]
    title = "A call: median (10th-90th percentile), page faults, memory of rank 0"
    return Table(title, header, rows)


if __name__ == "__main__":
    main()
