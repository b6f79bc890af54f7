"""What a rank of elastic.py tells of its steps, whatever library it trains by."""

from __future__ import annotations

import collections
import itertools
import json
import os
import socket
import statistics
import time

# What is told of a change is what this rank saw so long before it and so long after.
_SECONDS_AROUND = 1.0
# More than the steps of that time.
_MOST_STEPS = 1 << 18


class Steps:
    """The steps of this rank, of which it tells when its job has changed.

    Args:
        path: the benchmark's socket.
        number: this rank's, which no other has.
        version: of the library, for the table.
    """

    def __init__(self, path: str, number: int, version: str):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._ends: collections.deque[float] = collections.deque(maxlen=_MOST_STEPS)
        self._size = 0
        self._last = self._first = 0.0
        self._is_told = True
        self._tell(number=number, version=version)

    def end(self, size: int, **more: object) -> None:
        """Notes that a step has ended.

        Args:
            size: the number of ranks that made it; another one is another job.
            more: what else to tell of the job, once it has been there for a while.
        """
        now = time.monotonic()
        if size != self._size:
            self._last = self._ends[-1] if self._ends else now
            self._size, self._first, self._is_told = size, now, False
        self._ends.append(now)
        if not self._is_told and now - self._first > _SECONDS_AROUND:
            self._is_told = True
            self._tell(size=size, first=self._first, **self._between(), **more)

    def _between(self) -> dict[str, float]:
        """The seconds between two steps: the most, and those of the job before."""
        around = [end for end in self._ends if end > self._last - _SECONDS_AROUND]
        seconds = [after - before for before, after in itertools.pairwise(around)]
        before = [end for end in around if end <= self._last]
        usual = [after - before for before, after in itertools.pairwise(before)]
        return {
            "longest": max(seconds),
            "usual": statistics.median(usual) if usual else 0.0,
        }

    def _tell(self, **told: object) -> None:
        line = json.dumps({"process": os.getpid(), **told}) + "\n"
        self._socket.sendall(line.encode())
