"""The rows of arrays in the order of an epoch, and each rank's share of them.

An epoch orders all rows by its seed and its number. Ranks take them in turns, one row
each, so what all have had is a beginning of that order: one number, whatever the number
of ranks was and will be. As parts of a plan (see plan.py), the arrays are one piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_hvd.data.plan import START


@dataclasses.dataclass(frozen=True)
class Rows:
    """A plan of rows, the same on all ranks."""

    count: int
    seed: int
    shuffle: bool
    batch: int  # rows of each rank in a step
    rank: int  # among the ranks that share the rows
    size: int

    def share(self, rest: Sequence[np.ndarray] | None = None) -> np.ndarray:
        """This rank's part of an epoch, or of its rest: int64 of shape (1, 3)."""
        # Ranks that have made the same steps have left no row out before this one.
        begin = 0 if rest is None else min(int(each[0, START]) for each in rest)
        return np.array([[0, begin + self.rank, self.size]], np.int64)

    def limit(self, rest: Sequence[np.ndarray] | None = None) -> int:
        """No limit: all ranks make the same steps with all of their rows."""
        return -1

    def steps(self, rest: Sequence[np.ndarray] | None = None) -> int:
        """The number of batches of each rank, of an epoch or of its rest."""
        return -(-len(self.places(self.share(rest))) // self.batch)

    def places(self, part: np.ndarray) -> np.ndarray:
        """The places in the epoch's order that this rank takes, from its part.

        The last step has what is left, in shares that differ by one row at most. If
        fewer rows than ranks are left, several ranks have the same one.

        Example:

        >>> rows = Rows(count=9, seed=0, shuffle=True, batch=2, rank=1, size=2)
        >>> rows.places(rows.share())
        array([1, 3, 5, 7, 8])
        """
        begin = int(part[0, START])
        left = max(0, self.count - (begin - self.rank))
        few = left % (self.batch * self.size)
        if few >= self.size:
            few = 0
        end = self.count - few
        own = np.arange(begin, end, self.size)
        return np.append(own, end + self.rank * few // self.size) if few else own

    def order(self, epoch: int) -> np.ndarray:
        """The rows' numbers in the order of an epoch."""
        if not self.shuffle:
            return np.arange(self.count)
        # NumPy guarantees RandomState's streams forever, unlike newer generators'.
        random = np.random.RandomState([self.seed, epoch % 2**32])
        return random.permutation(self.count)

    def settings(self) -> dict[str, Any]:
        """What makes the rest of an epoch the same rows in another job."""
        return {"rows": self.count, "seed": self.seed, "shuffle": self.shuffle}
