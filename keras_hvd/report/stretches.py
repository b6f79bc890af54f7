"""Adds up the steps of a job, as RecordingFile and Recording do (tf_ops/timeline)."""

from __future__ import annotations

from array import array

import numpy as np

MOST_STRETCHES = 2048
_MOST_COLUMNS = 256
_BEGIN, _END, _STEPS = range(3)
SUMS = 8
"""What a row has before its columns for ranks: as in RecordingFile."""


class CoveredTime:
    """The time that is covered by spans, which come in about the order of time.

    Example:

    >>> time = CoveredTime()
    >>> time.add(0, 3); time.add(2, 5); time.add(10, 14)
    >>> time.take([4, 12]).tolist(), time.take([13]).tolist()
    ([4.0, 3.0], [1.0])
    """

    def __init__(self) -> None:
        self._begins, self._ends = array("d"), array("d")
        self._taken = -np.inf

    def add(self, begin: float, end: float) -> None:
        self._begins.append(begin)
        self._ends.append(end)

    def take(self, bounds: np.ndarray | list[float]) -> np.ndarray:
        """What is covered up to each bound, from the one before or the last call's."""
        begins, ends = np.array(self._begins), np.array(self._ends)
        begins = np.maximum(begins, self._taken)
        order = np.argsort(begins)
        begins, ends = begins[order], ends[order]
        reached = np.maximum.accumulate(np.concatenate([[-np.inf], ends]))[:-1]
        begins = np.maximum(begins, reached)
        is_more = begins < ends
        begins, ends = begins[is_more], ends[is_more]
        after = ends > bounds[-1]
        self._begins, self._ends = array("d", begins[after]), array("d", ends[after])
        self._taken = bounds[-1]
        if not len(begins):
            return np.zeros(len(bounds))
        until_end = np.cumsum(ends - begins)
        until_begin = until_end - (ends - begins)
        moments = np.column_stack([begins, ends]).ravel()
        covered = np.column_stack([until_begin, until_end]).ravel()
        return np.diff(np.interp(bounds, moments, covered), prepend=0)


class Stretches:
    """A bounded number of stretches of whole steps, of a job of `size` ranks.

    Example:

    >>> stretches = Stretches(size=1)
    >>> for step in range(5000):
    ...     sums = [step, step + 1, 1, 0, 0, 0, 0, 0]
    ...     stretches.add(np.array(sums), np.zeros(1), np.zeros(1))
    >>> rows = stretches.rows()
    >>> rows.shape, rows[-1, :3].tolist()
    ((1250, 10), [4996.0, 5000.0, 4.0])
    """

    def __init__(self, size: int):
        self._size = size
        self._in_column = -(-size // _MOST_COLUMNS)
        self._rows: list[np.ndarray] = []
        self._steps = 1  # of each but the last

    def add(self, sums: np.ndarray, waits: np.ndarray, waited_for: np.ndarray) -> None:
        """Adds a step: its first eight numbers, and those of each rank."""
        row = np.concatenate([sums, self._columns(waits), self._columns(waited_for)])
        if self._is_full() and len(self._rows) == MOST_STRETCHES:
            self._rows = list(map(_sum, self._rows[::2], self._rows[1::2]))
            self._steps *= 2
        if self._is_full():
            self._rows.append(row)
        else:
            self._rows[-1] = _sum(self._rows[-1], row)

    def rows(self) -> np.ndarray:
        """A row for each stretch: its sums, waits, and waits for each."""
        rows = np.array(self._rows).reshape(len(self._rows), -1)
        if not len(rows):
            return np.zeros((0, SUMS + 2 * self._size))
        halves = np.split(rows[:, SUMS:], 2, axis=1)
        by_rank = [
            np.repeat(half, self._in_column, axis=1)[:, : self._size] for half in halves
        ]
        return np.hstack([rows[:, :SUMS], *by_rank])

    def _is_full(self) -> bool:
        return not self._rows or self._rows[-1][_STEPS] >= self._steps

    def _columns(self, of_ranks: np.ndarray) -> np.ndarray:
        # Of ranks that share a column, the one with most counts.
        firsts = np.arange(0, self._size, self._in_column)
        return np.maximum.reduceat(of_ranks, firsts)


def _sum(row: np.ndarray, later: np.ndarray) -> np.ndarray:
    both = row + later
    both[_BEGIN], both[_END] = row[_BEGIN], later[_END]
    return both
