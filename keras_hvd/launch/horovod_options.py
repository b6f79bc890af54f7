"""Options of `horovodrun` that `khvdrun` does not need, and its answers to them.

Options that tune something this version lacks are accepted and explained. Options that
ask for a different kind of job are refused, with advice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from keras_hvd.job.settings import WITHOUT_EFFECT

_NO_ELASTIC_JOBS = (
    "this version of keras_hvd has no elastic jobs: give the number of processes with "
    "-np"
)
_NOTHING_KEPT = "nothing is kept from one start to the next"

# options, number of values, reason
_WITHOUT_EFFECT = (
    (("--cycle-time-ms",), 1, WITHOUT_EFFECT["CYCLE_TIME"]),
    (
        ("--autotune-gaussian-process-noise",),
        1,
        WITHOUT_EFFECT["AUTOTUNE_GAUSSIAN_PROCESS_NOISE"],
    ),
    (("--disable-cache",), 0, _NOTHING_KEPT),
    (("--gloo", "--mpi"), 0, WITHOUT_EFFECT["CONTROLLER"]),
    (("--tcp",), 0, WITHOUT_EFFECT["MPI_THREADS_DISABLE"]),
    (
        (
            *("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
            *("--hierarchical-allgather", "--no-hierarchical-allgather"),
            *("--torus-allreduce", "--no-torus-allreduce"),
        ),
        0,
        WITHOUT_EFFECT["HIERARCHICAL_ALLREDUCE"],
    ),
    (
        ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        0,
        WITHOUT_EFFECT["MPI_THREADS_DISABLE"],
    ),
    (("--num-nccl-streams",), 1, WITHOUT_EFFECT["NUM_NCCL_STREAMS"]),
    (("--thread-affinity",), 1, WITHOUT_EFFECT["THREAD_AFFINITY"]),
    (
        ("--ccl-bgt-affinity", "--mlsl-bgt-affinity"),
        1,
        WITHOUT_EFFECT["CCL_BGT_AFFINITY"],
    ),
)

# options, number of values, what to do
_REFUSED = (
    (("--min-np", "--min-num-proc"), 1, _NO_ELASTIC_JOBS),
    (("--max-np", "--max-num-proc"), 1, _NO_ELASTIC_JOBS),
    (("--slots", "--slots-per-host"), 1, _NO_ELASTIC_JOBS),
    (("--host-discovery-script", "--reset-limit"), 1, _NO_ELASTIC_JOBS),
    (("--elastic-timeout",), 1, _NO_ELASTIC_JOBS),
    (("--blacklist-cooldown-range",), 2, _NO_ELASTIC_JOBS),
    (("--binding-args",), 1, "bind ranks with --bind-to cores"),
    (("--jsrun",), 0, "khvdrun starts the ranks itself: leave it out"),
)


def add(add_argument: Callable[..., Any]) -> None:
    """Declares the options, hidden from the help.

    Ignored options end up in the namespace as `without_effect`, a dict from option to
    reason.
    """
    for action, rows in ((_Ignored, _WITHOUT_EFFECT), (_Refused, _REFUSED)):
        for options, values, text in rows:
            add_argument(
                *options,
                action=action,
                # argparse spells "one value" None.
                nargs=None if values == 1 else values,
                const=text,
                dest="without_effect",
                help=argparse.SUPPRESS,
            )


class _Ignored(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        # A new dict: the parser's default must not change.
        ignored = getattr(namespace, self.dest) or {}
        setattr(namespace, self.dest, {**ignored, option_string: self.const})


class _Refused(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string}: {self.const}")
