"""The engine's own time for tensors on GPUs: `python benchmarks/gpu_calls.py`.

Two ranks, each on a core of its own, reduce 4 B and ResNet-50's 161 gradients over a
CUDA and an NCCL that do nothing (null_cuda.c, null_nccl.c): what is left is the host's
time in the engine. An NCCL that does not block takes a thread for each group; of the
two that are measured one has such threads. Beside the time it says how often the engine
slept, and what it called of CUDA. Needs NumPy and a C compiler, and no GPU. Prints a
table, writes JSON and a plot.
"""

from __future__ import annotations

import argparse
import statistics

import environments
import jobs
import measurement
import plots
import tables
from tables import Check, Table, spread

from keras_hvd.job import cores
from keras_hvd.version import __version__

RANKS = 2
MODES = {"sync": "groups at once", "thread": "a thread for each group"}
WHAT = ("4 B", "161 tensors")
# The most of each for a call; a steady state makes no events.
MOST = {"sleeps": 0.05, "pushes": 2, "waits": 0, "creations": 0, "records": 2}

# mode: request: the summary of "seconds", and the counts of a call
Measured = dict[str, dict[str, dict]]


def main() -> None:
    measurement.end_on_sigterm()
    options = arguments()
    measured = {mode: measure_mode(mode, options) for mode in MODES}
    checks = requirements(measured)
    result = {
        "benchmark": "gpu_calls",
        "machine": options.machine,
        "versions": {"keras_hvd": f"keras_hvd {__version__}"},
        "settings": {
            "ranks": RANKS,
            "rows": options.rows,
            "calls": options.calls,
        },
        "measured": measured,
        "checks": checks,
        "tables": [table(measured), tables.check_table(checks)],
    }
    tables.publish(options.output, result)
    plots.bars(
        options.output / "gpu_calls.svg",
        "seconds a call",
        {
            MODES[mode]: {what: each["seconds"] for what, each in found.items()}
            for mode, found in measured.items()
        },
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measurement.add_output_argument(parser)
    parser.add_argument("--rows", type=int, default=100, help="of calls (default: 100)")
    parser.add_argument(
        "--calls", type=int, default=100, help="of a row (default: 100)"
    )
    jobs.add_engine_argument(parser)
    options = parser.parse_args()
    options.machine = measurement.machine()
    return options


def measure_mode(mode: str, options: argparse.Namespace) -> dict[str, dict]:
    """Both requests, over an NCCL of this kind."""
    # One core each: where two threads of a rank would take turns, none may sleep.
    ones = [str(min(share)) for share in cores.shares(RANKS)]
    job = jobs.gpu(
        "gpu_calls.py",
        options.engine,
        str(environments.compiled("null_cuda.c")),
        str(environments.compiled("null_nccl.c")),
        [*range(RANKS)],
        *("--version", f"keras_hvd {__version__}"),
        bound_to="/".join(ones),
        variables={"NULL_NCCL_MODE": mode, "NULL_CUDA_DEVICES": str(RANKS)},
    )
    try:
        return {what: measure(job, what, options) for what in WHAT}
    finally:
        job.close()


def measure(job: measurement.Job, what: str, options: argparse.Namespace) -> dict:
    """Rank 0's time, and the counts of the rank that has the most."""
    answers = job.ask(what=what, rows=options.rows, calls=options.calls)
    rows = [
        {name: max(each[name] for each in ranks) for name in ranks[0]}
        for ranks in zip(*(answer["rows"] for answer in answers))
    ]
    # Other processes on a core put ranks to sleep, and make them look again. A row is
    # so short that some row will be free of them.
    counts = {name: min(row[name] for row in rows) for name in MOST}
    # The events that the engine keeps may suffice for one row, and not for the next.
    counts["creations"] = statistics.median(row["creations"] for row in rows)
    seconds = measurement.summary([row["seconds"] for row in answers[0]["rows"]])
    return {"seconds": seconds, **counts}


def table(measured: Measured) -> Table:
    rows = [
        [MODES[mode], what, spread(found["seconds"])]
        + [f"{found[name]:.3g}" for name in MOST]
        for mode, whats in measured.items()
        for what, found in whats.items()
    ]
    header = ["NCCL has", "tensors", "time", "sleeps", "contexts pushed"]
    header += ["waits of streams", "events made", "recorded"]
    title = "A call, 2 ranks over a CUDA and an NCCL that do nothing"
    return Table(f"{title}: median (10th-90th percentile)", header, rows)


def requirements(measured: Measured) -> list[Check]:
    """The requirements on keras_hvd, checked against the figures."""
    return [
        Check(f"{MODES[mode]}, {what}: {name}", found[name], most, False, "a call")
        for mode, whats in measured.items()
        for what, found in whats.items()
        for name, most in MOST.items()
    ]


if __name__ == "__main__":
    main()
