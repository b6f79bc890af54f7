"""The speed of training on more and more ranks: `python benchmarks/speed.py`.

Trains the CNN of scaling.py, batch 128 on each rank: by keras_hvd under `fit`, by
copies of one process that exchange nothing, and by peers: PyTorch's
DistributedDataParallel over gloo, `fit` of Keras on JAX, and a custom loop under
MultiWorkerMirroredStrategy. Each rank has one core, and ranks share cores where there
are too few. All contenders of a number of ranks take turns. Prints a table, writes JSON
and a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jobs
import measurement
import plots
import tables
from environments import UnavailableError
from measurement import ContenderError, Job, summary
from tables import Table

from keras_hvd.job import cores

COPIES = "copies that exchange nothing"
OURS: dict[str, Callable[..., Job]] = {
    "keras_hvd": partial(jobs.keras_hvd, "training.py"),
    COPIES: partial(jobs.independent, "training.py"),
}
PEERS: dict[str, Callable[..., Job]] = {
    "PyTorch DDP": partial(jobs.peer, "ddp"),
    "Keras on JAX": partial(jobs.peer, "jax"),
    "MultiWorkerMirroredStrategy": partial(jobs.peer, "multi-worker"),
}

# Ranks: contender: summary of the steps a second of all ranks together.
Measured = dict[int, dict[str, dict[str, float]]]


def main() -> None:
    measurement.end_on_sigterm()
    options = arguments()
    mine = sorted(os.sched_getaffinity(0), key=cores.place)
    measured: Measured = {}
    versions: dict[str, str] = {}
    notes: list[str] = []
    for ranks in options.ranks:
        # The jobs divide these among their ranks.
        os.sched_setaffinity(0, mine[:ranks])
        with contextlib.ExitStack() as stack:
            contenders = start(ranks, options, stack, notes)
            versions |= {name: job.version for name, job in contenders.items()}
            measured[ranks] = {
                name: summary([ranks / each for each in seconds])
                for name, seconds in measurement.take_turns(
                    contenders, options.rounds
                ).items()
            }
    result = {
        "benchmark": "speed",
        "machine": options.machine,
        "versions": versions,
        "notes": notes,
        "settings": {
            "ranks": options.ranks,
            "rounds": options.rounds,
            "steps": options.steps,
            "batch": options.batch,
        },
        "measured": measured,
        "checks": [],
        "tables": [table(options, measured)],
    }
    tables.publish(options.output, result)
    plots.grouped(
        options.picture or options.output / "speed.svg",
        "steps a second, all ranks",
        {_ranks_text(ranks): found for ranks, found in measured.items()},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measurement.add_output_argument(parser)
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="default: speed.svg beside JSON"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[1, 2, 4],
        metavar="N",
        help="default: 1 2 4",
    )
    parser.add_argument(
        "--rounds", type=int, default=11, help="turns of each contender (default: 11)"
    )
    parser.add_argument(
        "--steps", type=int, default=25, help="of a turn, an epoch (default: 25)"
    )
    parser.add_argument(
        "--batch", type=int, default=128, help="of each rank (default: 128)"
    )
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    options = parser.parse_args()
    options.machine = measurement.machine()
    return options


def start(
    ranks: int,
    options: argparse.Namespace,
    stack: contextlib.ExitStack,
    notes: list[str],
) -> dict[str, Job]:
    """Contenders, after an epoch that compiles; the stack ends them.

    A peer that does not train is left out, and a note says why.
    """
    given = ["--steps", options.steps, "--batch", options.batch]
    started = {}
    for name, begin in {
        **OURS,
        **{each: PEERS[each] for each in options.peers},
    }.items():
        try:
            job = begin(ranks, *given)
            stack.callback(job.close)
            answers = job.ask()
            if name != COPIES:
                require_equal_weights(name, answers)
        except (ContenderError, UnavailableError) as error:
            if name in OURS:
                raise
            notes.append(f"Without {name} on {_ranks_text(ranks)}: {error}")
            continue
        started[name] = job
    return started


def require_equal_weights(name: str, answers: list[dict]) -> None:
    """Refuses ranks that train models of their own, which is fast.

    Raises:
        ContenderError: the norm of the weights differs between ranks.
    """
    norms = [answer["norm"] for answer in answers]
    if not all(math.isclose(norm, norms[0], rel_tol=1e-7) for norm in norms):
        raise ContenderError(f"{name}: the ranks' weights differ, of norms {norms}")


def table(options: argparse.Namespace, measured: Measured) -> Table:
    first, *others = measured
    rows = []
    for name in [*OURS, *options.peers]:
        found = {ranks: each[name] for ranks, each in measured.items() if name in each}
        row = [_speed(found[ranks]) if ranks in found else "-" for ranks in measured]
        for ranks in others:
            both = ranks in found and first in found
            gain = found[ranks]["median"] / found[first]["median"] if both else None
            row.append(f"{gain:.2f} x" if gain else "-")
        rows.append([name, *row])
    return Table(
        f"Steps a second of all ranks, batch {options.batch} each: median (10th-90th "
        "percentile)",
        ["trained by", *map(_ranks_text, measured)]
        + [f"{ranks} against {first}" for ranks in others],
        rows,
    )


def _speed(found: dict[str, float]) -> str:
    return f"{found['median']:.1f} ({found['p10']:.1f}-{found['p90']:.1f})"


def _ranks_text(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


if __name__ == "__main__":
    main()
