"""How long a model's gradients take: `python benchmarks/gradients.py`.

Reduces ResNet-50's 161 gradients, and 160 tensors of 100 numbers, as one group in a
`tf.function`, beside the C API and beside the same function without a collective. The
tensors are the function's arguments, which are the caller's and stay as they are, or
computed in it, as gradients are, so that their memory takes the results. Prints a
table, writes JSON and a plot.
"""

from __future__ import annotations

import argparse

import environments
import jobs
import measurement
import plots
import tables
from contenders.workloads import WORKLOADS, total_bytes
from tables import Check, Table, spread

TITLES = {
    "resnet50": "ResNet-50's 161 gradients (102 MB)",
    "tiny": "160 tensors of 100 numbers",
}
SERIES = {
    "grouped": "grouped in tf.function",
    "pass_through": "pass-through in tf.function",
    "computed_grouped": "computed, grouped",
    "computed_pass_through": "computed, pass-through",
    "c_api": "C API, one tensor",
    "c_api_group": "C API, grouped",
}

# workload: series: summary
Measured = dict[str, dict[str, dict[str, float]]]


def main() -> None:
    measurement.end_on_sigterm()
    options = arguments()
    job = jobs.keras_hvd(
        "keras_hvd_gradients.py",
        options.ranks,
        "--timed-calls",
        environments.compiled("timed_calls.c"),
    )
    try:
        measured = {
            workload: measure(job, workload, options) for workload in options.workloads
        }
    finally:
        job.close()
    checks = requirements(measured)
    result = {
        "benchmark": "gradients",
        "machine": options.machine,
        "versions": {"keras_hvd": job.version},
        "settings": {
            "ranks": options.ranks,
            "seconds": options.seconds,
            "rounds": options.rounds,
        },
        "measured": measured,
        "checks": checks,
        "tables": [table(options.ranks, measured), tables.check_table(checks)],
    }
    tables.publish(options.output, result)
    plots.bars(
        options.output / "gradients.svg",
        "seconds",
        {
            TITLES[workload]: {SERIES[what]: found for what, found in row.items()}
            for workload, row in measured.items()
        },
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measurement.add_arguments(parser, seconds=4, rounds=10)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS)
    )
    options = parser.parse_args()
    options.machine = measurement.machine()
    return options


def measure(
    job: measurement.Job, workload: str, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    series = [measurement.Series(what, job, f"{workload}/{what}") for what in SERIES]
    size = total_bytes(WORKLOADS[workload])
    return measurement.interleave(series, size, options.seconds, options.rounds)


def table(ranks: int, measured: Measured) -> Table:
    rows = [
        [TITLES[workload], *(spread(row[what]) for what in SERIES)]
        for workload, row in measured.items()
    ]
    header = ["group", *SERIES.values()]
    title = f"Grouped allreduce, {ranks} ranks: median (10th-90th percentile)"
    return Table(title, header, rows)


def requirements(measured: Measured) -> list[Check]:
    """The requirements on keras_hvd, checked against the figures."""
    checks = []
    for workload, row in measured.items():
        for given, prefix in (("", ""), (", computed", "computed_")):
            grouped, bare = row[f"{prefix}grouped"], row[f"{prefix}pass_through"]
            over = grouped["median"] - bare["median"]
            what = f"{TITLES[workload]}{given}: above the pass-through call"
            if workload == "tiny":
                checks.append(Check(what, 1e3 * over, 0.7, False, "ms"))
            else:
                ratio = over / row["c_api"]["median"]
                checks.append(Check(f"{what}, against C API", ratio, 1.3, False, "x"))
    return checks


if __name__ == "__main__":
    main()
