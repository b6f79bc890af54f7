"""What training together costs: `python benchmarks/scaling.py`.

Trains a CNN of 1.2 million parameters under `fit`, batch 128 on each rank, on N ranks,
and on N independent copies of one process each that run at the same time, bound to the
same cores. The copies know nothing of each other: their speed is 100 %. With `fit`'s
defaults and with `jit_compile=True`. Prints a table, writes JSON and a plot.
"""

from __future__ import annotations

import argparse
import statistics

import jobs
import measurement
import plots
import tables
from measurement import ContenderError, summary
from tables import Check, Table, spread

VARIANTS = {"defaults": [], "jit_compile=True": ["--jit-compile"]}
TOGETHER, APART = "together", "apart"
WANTED_PERCENT = 97

# variant: TOGETHER, APART or "efficiency": summary
Measured = dict[str, dict[str, dict[str, float]]]


def main() -> None:
    options = arguments()
    pairs = {}
    try:
        for variant in options.variants:
            if pair := start(variant, options):
                pairs[variant] = pair
        versions = {variant: pair[TOGETHER].version for variant, pair in pairs.items()}
        measured = measure(pairs, options.rounds)
    finally:
        for pair in pairs.values():
            for job in pair.values():
                job.close()
    checks = [
        Check(
            f"{variant}, {options.ranks} ranks: efficiency",
            100 * found["efficiency"]["median"],
            WANTED_PERCENT,
            True,
            "%",
        )
        for variant, found in measured.items()
    ]
    result = {
        "benchmark": "scaling",
        "machine": options.machine,
        "versions": versions,
        "settings": {
            "ranks": options.ranks,
            "rounds": options.rounds,
            "steps": options.steps,
            "batch": options.batch,
        },
        "measured": measured,
        "checks": checks,
        "tables": [table(options, measured), tables.check_table(checks)],
    }
    tables.publish(options.output, result)
    plots.bars(
        options.output / "scaling.svg",
        "milliseconds a step",
        {
            variant: {
                f"{options.ranks} {how}": {
                    key: 1e3 * found[how][key] for key in ("median", "p10", "p90")
                }
                for how in (TOGETHER, APART)
            }
            for variant, found in measured.items()
        },
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measurement.add_output_argument(parser)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--rounds", type=int, default=11, help="turns of each contender (default: 11)"
    )
    parser.add_argument(
        "--steps", type=int, default=25, help="of a turn, an epoch (default: 25)"
    )
    parser.add_argument(
        "--batch", type=int, default=128, help="of each rank (default: 128)"
    )
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS)
    )
    options = parser.parse_args()
    options.machine = measurement.machine()
    return options


def start(
    variant: str, options: argparse.Namespace
) -> dict[str, measurement.Job] | None:
    """N ranks and N copies, after an epoch that compiles; None if they cannot train."""
    arguments = ["--steps", options.steps, "--batch", options.batch]
    arguments += VARIANTS[variant]
    pair = {}
    try:
        pair[TOGETHER] = jobs.keras_hvd("training.py", options.ranks, *arguments)
        pair[TOGETHER].ask()
        pair[APART] = jobs.independent("training.py", options.ranks, *arguments)
        pair[APART].ask()
    except ContenderError as error:
        print(f"Without {variant}: {error}", flush=True)
        for job in pair.values():
            job.close()
        return None
    return pair


def measure(pairs: dict[str, dict[str, measurement.Job]], rounds: int) -> Measured:
    """Asks ranks and copies in turn; each round is one comparison."""
    seconds = {variant: {TOGETHER: [], APART: []} for variant in pairs}
    for number in range(rounds):
        for variant, pair in pairs.items():
            # Whoever comes first in a round comes second in the next.
            for how in (TOGETHER, APART) if number % 2 else (APART, TOGETHER):
                answers = pair[how].ask()
                mean = statistics.mean(answer["seconds"][0] for answer in answers)
                seconds[variant][how].append(mean)
    return {
        variant: {
            TOGETHER: summary(found[TOGETHER]),
            APART: summary(found[APART]),
            "efficiency": summary(
                [apart / joint for apart, joint in zip(found[APART], found[TOGETHER])]
            ),
        }
        for variant, found in seconds.items()
    }


def table(options: argparse.Namespace, measured: Measured) -> Table:
    rows = []
    for variant, found in measured.items():
        ratio = found["efficiency"]
        rows.append(
            [
                variant,
                spread(found[TOGETHER]),
                spread(found[APART]),
                f"{ratio['median']:.1%} ({ratio['p10']:.1%}-{ratio['p90']:.1%})",
            ]
        )
    many = options.ranks
    return Table(
        f"A step under fit, batch {options.batch} a rank: median (10th-90th percentile)",
        ["fit with", f"{many} ranks", f"{many} independent copies", "efficiency"],
        rows,
    )


if __name__ == "__main__":
    main()
