"""A plan of the ranks' samples, as numbers: pieces, their parts, and their order.

A piece is read from its beginning: a file, or a row group of one. An epoch orders its
samples (see `from_files`), and a part is an arithmetic progression of places in that
order: every `step`-th place from `start`. A whole piece is the part (0, 1). After `n`
samples of a part, the rest is (start + n * step, step), and every k-th sample of it
from the j-th is (start + (n + j) * step, step * k). So the rest of an epoch is three
numbers per part, for any number of ranks before and after. The number of samples in a
piece is needed only to give all ranks equally many.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

PIECE, START, STEP = range(3)
"""The columns of parts, an int64 array of shape (parts, 3)."""


DEALT = "keras_hvd_dealt"
"""The name, in graphs, of datasets that have the samples of one rank from the start."""

# The number of parts into which `split` divides each rank's work.
_PARTS_OF_RANK = 8


@dataclasses.dataclass(frozen=True)
class Piece:
    """A file or row group, read from its beginning."""

    path: str
    group: int  # the row group; -1 for the whole file
    size: int  # in bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """The files, the same on all ranks, and the settings of their order."""

    pieces: Sequence[Piece]
    seed: int
    shuffle: int  # how many neighbours in a piece are shuffled together
    rank: int  # among the ranks that share the pieces
    size: int
    # All ranks hand out the same number of samples, a multiple of it; 0: all they have.
    batch: int = 0
    counts: Sequence[int] = ()  # samples of each piece; empty if unknown

    def share(self, rest: Sequence[np.ndarray] | None = None) -> np.ndarray:
        """This rank's parts of an epoch, or of its rest: int64 of shape (own parts, 3).

        In a whole epoch they are whole pieces if there are as many pieces as ranks.
        `rest` has the remaining parts of each rank; the number of ranks may have
        changed since.
        """
        return self._shares(rest)[self.rank]

    def limit(self, rest: Sequence[np.ndarray] | None = None) -> int:
        """The number of samples that each rank hands out of its share; -1 for all."""
        if not self.batch:
            return -1
        counts = np.array(self.counts, np.int64)
        least = min(int(lengths(each, counts).sum()) for each in self._shares(rest))
        return least // self.batch * self.batch

    def steps(self, rest: Sequence[np.ndarray] | None = None) -> int:
        """The number of batches of each rank; 0 if their size is unknown."""
        return self.limit(rest) // self.batch if self.batch else 0

    def _shares(self, rest: Sequence[np.ndarray] | None) -> Sequence[np.ndarray]:
        sizes = np.array([piece.size for piece in self.pieces], np.int64)
        if rest is None:
            # By bytes, whether or not the numbers of samples are known.
            return shares(whole(len(sizes)), sizes.astype(np.float64), self.size)
        if len(rest) == self.size:
            return rest
        parts = np.concatenate(rest)
        if not self.counts:
            weights = remaining(parts, sizes)
            return shares(*split(parts, weights, self.size), self.size)
        counts = np.array(self.counts, np.int64)
        parts, _ = split(parts, lengths(parts, counts), self.size)
        # Those that a part was divided into differ by a sample.
        return shares(parts, lengths(parts, counts), self.size)

    def order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Each piece's place in an epoch and its order's seed: int64, (pieces,)."""
        # NumPy guarantees RandomState's streams forever, unlike newer generators'.
        random = np.random.RandomState([self.seed, epoch % 2**32])
        places = random.permutation(len(self.pieces)).astype(np.int64)
        seeds = random.randint(0, 2**31 - 1, len(self.pieces), np.int64)
        if self.shuffle < 2:
            places = np.arange(len(self.pieces))
        return places, seeds

    def settings(self) -> dict[str, Any]:
        """What makes the rest of an epoch the same samples in another job."""
        return {
            "files": self.digest(),
            "pieces": len(self.pieces),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def digest(self) -> str:
        """A fingerprint of the pieces: names of files without folders, and sizes."""
        lines = (
            f"{os.path.basename(piece.path)}/{piece.group}/{piece.size}\n"
            for piece in self.pieces
        )
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def whole(pieces: int) -> np.ndarray:
    """The parts of a whole epoch: int64 of shape (pieces, 3).

    Example:

    >>> whole(2)
    array([[0, 0, 1],
           [1, 0, 1]])
    """
    parts = np.zeros((pieces, 3), np.int64)
    parts[:, PIECE] = np.arange(pieces)
    parts[:, STEP] = 1
    return parts


def lengths(parts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The number of samples in each part, from the pieces' `counts`.

    Example:

    >>> lengths(np.array([[0, 1, 2], [0, 9, 1]]), np.array([6]))
    array([3, 0])
    """
    left = counts[parts[:, PIECE]] - parts[:, START]
    return np.maximum(-(-left // parts[:, STEP]), 0)


def remaining(parts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Estimates the bytes left in each part from the pieces' sizes, for balance.

    Example: of 800 bytes each, 4 samples of the first were read, and 2 of the second.

    >>> remaining(np.array([[0, 4, 1], [1, 2, 1]]), np.array([800, 800]))
    array([  0., 400.])
    """
    size = sizes[parts[:, PIECE]].astype(np.float64)
    taken = np.maximum(parts[:, START] - parts[:, STEP] + 1, 0)
    # An upper bound of a sample's size: no piece can have lost more than its size.
    largest = np.min(size[taken > 0] / taken[taken > 0], initial=np.inf)
    left = size - np.where(taken > 0, largest * taken, 0.0) if taken.any() else size
    return np.maximum(left, 0.0) / parts[:, STEP]


def shares(parts: np.ndarray, weights: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Divides parts among ranks, with about equal sums of `weights`.

    With fewer parts than ranks each rank gets a part of all of them.

    Example:

    >>> first, second = shares(whole(3), np.array([5.0, 3.0, 3.0]), 2)
    >>> first[:, PIECE], second[:, PIECE]
    (array([0]), array([1, 2]))
    >>> shares(whole(1), np.array([5.0]), 2)
    [array([[0, 0, 2]]), array([[0, 1, 2]])]
    """
    if len(parts) < ranks:
        return [_every(parts, rank, ranks) for rank in range(ranks)]
    # The largest first, each to the rank with the least.
    loads = [(0.0, 0, rank) for rank in range(ranks)]
    owners = np.zeros(len(parts), np.int64)
    for part in np.argsort(-weights, kind="stable"):
        load, count, rank = loads[0]
        owners[part] = rank
        heapq.heapreplace(loads, (load + float(weights[part]), count + 1, rank))
    return [parts[owners == rank] for rank in range(ranks)]


def split(
    parts: np.ndarray, weights: np.ndarray, ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Divides large parts, at most into `ranks`, so that they can be shared evenly.

    Returns the new parts and their weights.

    Example:

    >>> split(np.array([[0, 4, 1]]), np.array([6.0]), 2)
    (array([[0, 4, 2],
           [0, 5, 2]]), array([3., 3.]))
    """
    most = max(float(weights.sum()) / (_PARTS_OF_RANK * ranks), 1e-9)
    ways = np.clip(np.ceil(np.minimum(weights / most, weights)), 1, ranks)
    ways = ways.astype(np.int64)
    result = np.repeat(parts, ways, axis=0)
    place = np.arange(len(result)) - np.repeat(np.cumsum(ways) - ways, ways)
    result[:, START] += place * result[:, STEP]
    result[:, STEP] *= np.repeat(ways, ways)
    return result, np.repeat(weights / ways, ways)


def _every(parts: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """Every `ranks`-th place of each part; the first rank rotates between parts."""
    result = parts.copy()
    first = (rank + np.arange(len(parts))) % ranks
    result[:, START] += first * parts[:, STEP]
    result[:, STEP] *= ranks
    return result
