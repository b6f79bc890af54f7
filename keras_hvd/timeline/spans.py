"""Stretches of time, and the time that they cover."""

from __future__ import annotations

from array import array

import numpy as np


class Spans:
    """Stretches of time, which come in about the order of time.

    Example:

    >>> spans = Spans()
    >>> spans.add(0, 3); spans.add(2, 5); spans.add(10, 14)
    >>> spans.durations().tolist(), spans.covered()
    ([3.0, 3.0, 4.0], 9.0)
    >>> spans.take([4, 12]).tolist(), spans.take([13]).tolist()
    ([4.0, 3.0], [1.0])
    """

    def __init__(self) -> None:
        self._begins, self._ends = array("d"), array("d")
        self._taken = -np.inf

    def add(self, begin: float, end: float) -> None:
        self._begins.append(begin)
        self._ends.append(end)

    def durations(self) -> np.ndarray:
        """The length of each: float64 of shape (count,)."""
        return np.subtract(self._ends, self._begins)

    def covered(self) -> float:
        """The time in which there was at least one of them."""
        begins, ends = self._disjoint()
        return float((ends - begins).sum())

    def take(self, bounds: np.ndarray | list[float]) -> np.ndarray:
        """The time covered up to each bound, from the one before or the last call's.

        Spans before the last bound are not kept.
        """
        begins, ends = self._disjoint()
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

    def _disjoint(self) -> tuple[np.ndarray, np.ndarray]:
        """Begins and ends of disjoint spans, in order, from the last `take` on."""
        begins, ends = np.maximum(self._begins, self._taken), np.array(self._ends)
        order = np.argsort(begins)
        begins, ends = begins[order], ends[order]
        reached = np.maximum.accumulate(np.concatenate([[-np.inf], ends]))[:-1]
        begins = np.maximum(begins, reached)
        is_more = begins < ends
        return begins[is_more], ends[is_more]
