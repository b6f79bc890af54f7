"""What TensorFlow's memory costs: `python benchmarks/allocator.py`.

Large results take the time of the page faults of memory that was given back to the
system before. Runs collectives and steps of training under several allocators, each in
processes of its own, in turn: the time of a call, its page faults, and the memory of a
rank. Prints tables and writes JSON and a plot.
"""

from __future__ import annotations

import argparse
import statistics

import environments
import jobs
import measurement
import plots
import tables
from measurement import summary
from tables import Table, duration, spread

# What each rank is started with.
GLIBC = {"KERAS_HVD_ALLOCATOR": "unchanged"}
KEPT = {**GLIBC, "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
ALLOCATORS = {
    "unchanged": GLIBC,
    "pool": {"TF_CPU_ALLOCATOR_USE_BFC": "true"},
    "huge pages": {**GLIBC, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "kept, one arena": {**KEPT, "MALLOC_ARENA_MAX": "1"},
    "kept, two arenas": {**KEPT, "MALLOC_ARENA_MAX": "2"},
    "kept": KEPT,
    "thresholds of 1 GiB": {**GLIBC, **THRESHOLDS},
    "thresholds, one arena": {**GLIBC, **THRESHOLDS, "MALLOC_ARENA_MAX": "1"},
    "pool, huge pages": {"TF_CPU_ALLOCATOR_USE_BFC": "true", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "tcmalloc": {**GLIBC, "LD_PRELOAD": "/tmp/tcm/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"},
}
# How many ranks, and how many calls a turn.
WORKLOADS = {
    "c_api/64": (2, 20),
    "allreduce/64": (2, 10),
    "c_api/16": (2, 60),
    "allreduce/16": (2, 40),
    "c_api/1": (2, 400),
    "allreduce/1": (2, 200),
    "gradients": (2, 10),
    "elements": (1, 20),
    "cnn": (1, 10),
    "mlp": (1, 3),
    "embedding": (1, 10),
    "transformer": (1, 150),
}


def main() -> None:
    measurement.end_on_sigterm()
    options = arguments()
    for workload in options.workloads:
        ranks, calls = WORKLOADS[workload]
        names = ["unchanged"] if workload.startswith("c_api") else options.allocators
        series = {n: [] for n in names}
        started = {}
        try:
            for n in names:
                started[n] = jobs.keras_hvd("allocator.py", ranks, "--workload", workload,
                    "--timed-calls", environments.compiled("timed_calls.c"), variables={**ALLOCATORS[n], **({"TF_ENABLE_ONEDNN_OPTS": options.onednn} if options.onednn else {})})
            first = {n: j.ask(repeats=max(3, calls // 10)) for n, j in started.items()}
            for _ in range(options.rounds):
                for n, j in started.items():
                    series[n].append(j.ask(repeats=calls))
        finally:
            for j in started.values(): j.close()
        for n in names:
            seconds = [s for a in series[n] for s in a[0]["seconds"]]
            last = series[n][-1][0]
            s = summary(seconds)
            print(f"{workload:14} {n:22} {spread(s):28} mean {1e3*s['mean']:8.3f} faults {statistics.median([a[0]['faults'] for a in series[n]]):9.1f} resident {first[n][0]['resident']>>20:5} -> {last['resident']>>20:5} peak {last['peak']>>20:5} MiB", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--onednn", default="")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--allocators", nargs="+", default=list(ALLOCATORS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
