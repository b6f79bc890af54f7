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
    measurement.end_on_sigterm()
    options = arguments()
    pairs, refused = {}, {}
    try:
        for variant in options.variants:
            try:
                pairs[variant] = start(variant, options)
            except ContenderError as error:
                refused[variant] = str(error)
                print(f"Without {variant}: {error}", flush=True)
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
        "refused": refused,
        "checks": checks,
        "tables": [table(options, measured, refused), tables.check_table(checks)],
    }
    tables.publish(options.output, result)
    plots.bars(
        options.output / "scaling.svg",
        "seconds a step",
        {
            variant: {f"{options.ranks} {how}": found[how] for how in (TOGETHER, APART)}
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


def start(variant: str, options: argparse.Namespace) -> dict[str, measurement.Job]:
    """N ranks and N copies, after an epoch that compiles."""
    arguments = ["--steps", options.steps, "--batch", options.batch]
    arguments += VARIANTS[variant]
    pair = {}
    try:
        for how, begin in ((TOGETHER, jobs.keras_hvd), (APART, jobs.independent)):
            pair[how] = begin("training.py", options.ranks, *arguments)
            pair[how].ask()
    except ContenderError:
        for job in pair.values():
            job.close()
        raise
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


def table(
    options: argparse.Namespace, measured: Measured, refused: dict[str, str]
) -> Table:
    rows = [[variant, "does not train", "-", "-"] for variant in refused]
    for variant, found in measured.items():
        ratio = found["efficiency"]
        percent = f"{ratio['median']:.1%} ({ratio['p10']:.1%}-{ratio['p90']:.1%})"
        rows.append([variant, spread(found[TOGETHER]), spread(found[APART]), percent])
    many = options.ranks
    return Table(
        f"A step of fit, batch {options.batch} a rank: median (10th-90th percentile)",
        ["fit with", f"{many} ranks", f"{many} independent copies", "efficiency"],
        rows,
    )


if __name__ == "__main__":
    main()
