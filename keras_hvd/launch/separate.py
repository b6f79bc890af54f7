"""Detects ranks that have trained separately, since none has joined the job.

A script may know nothing of keras_hvd. A rank's mapped files show whether it runs
TensorFlow. They are looked at when it writes something: TensorFlow itself writes as
soon as it computes. Pauses between two looks become longer and longer.
"""

from __future__ import annotations

import time

from keras_hvd.launch import processes
from keras_hvd.world.rendezvous.nodes import NodeRanks

_FIRST_PAUSE_SECONDS = 0.25

_TENSORFLOW = b"/libtensorflow_"


class SeparateTrainings:
    """Watches for separate trainings in the ranks that this `khvdrun` starts.

    Example:

    >>> separate = SeparateTrainings(NodeRanks(0, 2, "a job of this example"))
    >>> separate.look()
    >>> separate.warning()
    ''
    """

    def __init__(self, ranks: NodeRanks):
        self._size = ranks.size
        self._is_first = ranks.first_rank == 0
        self._trains = False
        self._pause = _FIRST_PAUSE_SECONDS
        self._look_at = 0.0

    def look(self) -> None:
        """Checks whether a rank, which has just written something, runs TensorFlow."""
        is_known = self._trains or self._size == 1
        if is_known or time.monotonic() < self._look_at:
            return
        self._trains = any(map(_runs_tensorflow, processes.descendants()))
        self._look_at = time.monotonic() + self._pause
        self._pause *= 2

    def warning(self) -> str:
        """The warning at the end of a job that no rank has joined; "" for none."""
        if not (self._trains and self._is_first):
            return ""
        return (
            f"warning: no rank called keras_hvd.init(): these were {self._size} "
            "separate trainings"
        )


def _runs_tensorflow(process: int) -> bool:
    try:
        with open(f"/proc/{process}/maps", "rb") as maps:
            return _TENSORFLOW in maps.read()
    except OSError:
        # It has ended, or belongs to another user.
        return False
