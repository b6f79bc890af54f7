"""A rank of `keras_hvd.spark.run`: a child process of its task.

Spark uses the processes of its tasks again, where a second job would find the first
one's engine. The task starts `launch`, which starts the rank and outlives neither.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import sys
from collections.abc import Mapping

import pyarrow

from keras_hvd.exceptions import KerasHvdError
from keras_hvd.launch import call, guardian, processes
from keras_hvd.launch.job import Job
from keras_hvd.launch.options import Options
from keras_hvd.world.rendezvous.listener import adopt_early
from keras_hvd.world.rendezvous.nodes import NodeRanks

ROWS = "KERAS_HVD_SPARK_ROWS"
"""The variable with the path of the rank's Arrow file."""

_ROOT = str(pathlib.Path(__file__).resolve().parents[2])
_START = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); from keras_hvd.spark import rank; "
    "sys.exit(rank.{}(*sys.argv[1:]))"
)


def rows() -> pyarrow.Table:
    """This rank's rows of the DataFrame that `run` was given as `df`.

    They stay in a file of this host, and are read where they are used.

    Returns:
        A table of the DataFrame's columns.

    Raises:
        KerasHvdError: this is no rank of `run(..., df=df)`.

    Example::

        def train():
            keras_hvd.init()
            table = keras_hvd.spark.rows()
            x = np.stack([table[name].to_numpy() for name in ("a", "b")], axis=1)

        keras_hvd.spark.run(train, num_proc=4, df=df)
    """
    path = os.environ.get(ROWS)
    if path is None:
        raise KerasHvdError(
            "rows: only ranks of keras_hvd.spark.run(..., df=df) have rows"
        )
    with pyarrow.memory_map(path) as file:
        return pyarrow.ipc.open_stream(file).read_all()


def command_of(name: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command for a function of this module, in a process of its own."""
    return [python, "-c", _START.replace("{}", name), *arguments]


class _JobOfRank(Job):
    """A job of this process that is one rank of a larger one, as its task knows."""

    def __init__(
        self,
        options: Options,
        place: Mapping[str, str],
        guardian: int,
        signal_mask: set[int],
    ):
        rank, size = (int(place[f"KERAS_HVD_{name}"]) for name in ("RANK", "SIZE"))
        super().__init__(options, NodeRanks(rank, size, ""), guardian, signal_mask)
        self._place = place

    def _environment(self, here: int) -> dict[str, str]:
        return {**self._variables, **self._place}


def launch(parent: str, file: str) -> int:
    """Runs a rank for its task, the process `parent`, and returns the exit code."""
    processes.die_with_parent(int(parent))
    with open(file, "rb") as opened:
        options, place = pickle.load(opened)
    return guardian.run(lambda held, mask: _JobOfRank(options, place, held, mask))


def serve(made: str, outcome: str) -> int:
    """Makes the call in file `made`, and returns the exit code."""
    if os.environ["KERAS_HVD_RANK"] == "0":
        # Its task listens, and gave it that as standard input.
        adopt_early(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return call.serve_one(made, outcome)
