"""What training together costs: `python benchmarks/scaling.py`.

Trains a CNN of 1.2 million parameters under `fit`, batch 128 on each rank, on N ranks,
with `DistributedOptimizer` and with `Strategy`, and on N copies of one process that
run at the same time, bound to the same cores. Independent copies know nothing of each
other. Copies that meet wait for each other before each step, as every job has to, and
exchange nothing: their speed is 100 %. With one thread of TensorFlow's to run ops in,
the default of a rank with one core, with two, and with `jit_compile=True`. Prints a
table, writes JSON and a plot.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable

import jobs
import measurement
import plots
import tables
from measurement import ContenderError, Job, summary
from tables import Check, Table, spread

VARIANTS = {
    "one inter-op thread": ["--inter-op-threads", 1],
    "two inter-op threads": ["--inter-op-threads", 2],
    "jit_compile=True": ["--jit-compile", "yes"],
}
APART, MEETING = "independent copies", "copies that meet"
RANKS: dict[str, list[object]] = {
    "DistributedOptimizer": [],
    "Strategy": ["--strategy"],
}
CONTENDERS: dict[str, Callable[..., Job]] = {
    APART: jobs.independent,
    MEETING: jobs.meeting,
    **dict.fromkeys(RANKS, jobs.keras_hvd),
}
WANTED_PERCENT = 98

# Variant: contender: summaries of its "seconds" for a step, and of its speed against
# each kind of copies.
Measured = dict[str, dict[str, dict[str, dict[str, float]]]]


def main() -> None:
    measurement.end_on_sigterm()
    options = arguments()
    measured: Measured = {}
    versions, refused = {}, {}
    for variant in options.variants:
        with contextlib.ExitStack() as stack:
            try:
                contenders = start(variant, options, stack)
            except ContenderError as error:
                refused[variant] = str(error)
                print(f"Without {variant}: {error}", flush=True)
                continue
            versions[variant] = contenders[APART].version
            measured[variant] = measure(contenders, options.rounds)
    checks = [
        Check(
            f"{variant}, {options.ranks} ranks, {name}: speed of copies that meet",
            100 * found[name][MEETING]["median"],
            WANTED_PERCENT,
            True,
            "%",
        )
        for variant, found in measured.items()
        for name in RANKS
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
            variant: {name: each["seconds"] for name, each in found.items()}
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
    variant: str, options: argparse.Namespace, stack: contextlib.ExitStack
) -> dict[str, Job]:
    """Ranks and copies, after an epoch that compiles; the stack ends them."""
    given = ["--steps", options.steps, "--batch", options.batch, *VARIANTS[variant]]
    contenders = {}
    for name, begin in CONTENDERS.items():
        job = begin("training.py", options.ranks, *given, *RANKS.get(name, []))
        stack.callback(job.close)
        job.ask()
        contenders[name] = job
    return contenders


def measure(
    contenders: dict[str, Job], rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Asks ranks and copies in turn; each round is one comparison."""
    seconds = measurement.take_turns(contenders, rounds)
    return {
        name: {
            "seconds": summary(found),
            **{
                copies: summary([a / b for a, b in zip(seconds[copies], found)])
                for copies in (APART, MEETING)
            },
        }
        for name, found in seconds.items()
    }


def table(
    options: argparse.Namespace, measured: Measured, refused: dict[str, str]
) -> Table:
    rows = [[variant, "does not train", "-", "-", "-"] for variant in refused]
    for variant, found in measured.items():
        for name, each in found.items():
            speeds = [_percent(each[copies]) for copies in (APART, MEETING)]
            rows.append([variant, name, spread(each["seconds"]), *speeds])
    return Table(
        f"A step of fit, {options.ranks} processes, batch {options.batch} each: median "
        "(10th-90th percentile)",
        ["fit with", "", "a step", f"speed of {APART}", f"speed of {MEETING}"],
        rows,
    )


def _percent(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.1%} ({ratio['p10']:.1%}-{ratio['p90']:.1%})"


if __name__ == "__main__":
    main()
