"""Which rank reads which samples, as numbers: pieces, parts of them, and their order.

A piece is what is read from its beginning on: a file, or a row group of one. Its
samples have an order in an epoch (see `from_files`), and a part is an arithmetic
progression of places in it: every `step`-th, from `start` on. A whole piece is the part
(0, 1); what is left of a part of which `n` were taken is (start + n * step, step); and
every k-th of that, from the j-th on, is (start + (n + j) * step, step * k). So what is
left of an epoch is three numbers a part, whatever ranks there were and will be, and
nobody needs to know how many samples a piece has, but to give all ranks as many.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import os
from collections.abc import Sequence

import numpy as np

PIECE, START, STEP = range(3)
"""The columns of parts, an int64 array of shape (parts, 3)."""


FROM_FILES = "keras_hvd_from_files"
"""The name of the datasets of `from_files`, in the graphs of all made of them."""

# Into which `split` would divide the work of each rank.
_PARTS_OF_RANK = 8


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is read from its beginning on.

    Args:
        path: the file.
        group: the row group in it; -1 for the whole file.
        size: what is to be read, in bytes.
    """

    path: str
    group: int
    size: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all ranks know of the files, and the settings that their order depends on.

    Args:
        pieces: the same on all ranks.
        seed: of the orders.
        shuffle: how many neighbours in a piece are shuffled among each other.
        rank: this rank, among those that share the pieces.
        size: how many share them.
        batch: ranks hand out as many samples, a multiple of it; 0: all they have.
        counts: how many samples the pieces have; empty if nobody knows.
    """

    pieces: Sequence[Piece]
    seed: int
    shuffle: int
    rank: int
    size: int
    batch: int = 0
    counts: Sequence[int] = ()

    def share(self, rest: Sequence[np.ndarray] | None = None) -> np.ndarray:
        """This rank's parts of an epoch.

        Of a whole epoch these are whole pieces, if there are as many as ranks. The rest
        of an epoch stays with its ranks, or is divided anew if there are others now.

        Args:
            rest: what is left of each rank's parts; None for a whole epoch.

        Returns:
            An int64 array of shape (own parts, 3).
        """
        return self._shares(rest)[self.rank]

    def limit(self, rest: Sequence[np.ndarray] | None = None) -> int:
        """How many samples of its share each rank hands out.

        Args:
            rest: as for `share`.

        Returns:
            The number; -1 for all.
        """
        if not self.batch:
            return -1
        counts = np.array(self.counts, np.int64)
        least = min(int(lengths(each, counts).sum()) for each in self._shares(rest))
        return least // self.batch * self.batch

    def _shares(self, rest: Sequence[np.ndarray] | None) -> Sequence[np.ndarray]:
        sizes = np.array([piece.size for piece in self.pieces], np.int64)
        if rest is None:
            # By bytes, whether the numbers of samples are known or not.
            return shares(whole(len(sizes)), sizes.astype(np.float64), self.size)
        if len(rest) == self.size:
            return rest
        parts = np.concatenate(rest)
        if self.counts:
            weights = lengths(parts, np.array(self.counts, np.int64))
        else:
            weights = remaining(parts, sizes)
        return shares(*split(parts, weights, self.size), self.size)

    def order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Where in an epoch each piece comes, and the seed of its samples' order.

        Args:
            epoch: its number.

        Returns:
            Two int64 arrays of shape (pieces,).
        """
        # RandomState's streams, unlike those of newer generators, never change.
        random = np.random.RandomState([self.seed, epoch % 2**32])
        places = random.permutation(len(self.pieces)).astype(np.int64)
        seeds = random.randint(0, 2**31 - 1, len(self.pieces), np.int64)
        if self.shuffle < 2:
            places = np.arange(len(self.pieces))
        return places, seeds

    def digest(self) -> str:
        """A fingerprint of the pieces: of files' names, without folders, and sizes."""
        lines = (
            f"{os.path.basename(piece.path)}/{piece.group}/{piece.size}\n"
            for piece in self.pieces
        )
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def whole(pieces: int) -> np.ndarray:
    """The parts of an epoch that has not begun.

    Args:
        pieces: how many there are.

    Returns:
        An int64 array of shape (pieces, 3).

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
    """How many samples parts have.

    Args:
        parts: of shape (parts, 3).
        counts: how many the pieces have.

    Returns:
        An int64 array of shape (parts,).

    Example:

    >>> lengths(np.array([[0, 1, 2], [0, 9, 1]]), np.array([6]))
    array([3, 0])
    """
    left = counts[parts[:, PIECE]] - parts[:, START]
    return np.maximum(-(-left // parts[:, STEP]), 0)


def remaining(parts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """How much there is left in parts to read, roughly: it only balances.

    Args:
        parts: of shape (parts, 3).
        sizes: of the pieces, in bytes.

    Returns:
        A float64 array of shape (parts,), in bytes.

    Example:

    Of 800 bytes each, 4 samples of the first were read, and 2 of the second.

    >>> remaining(np.array([[0, 4, 1], [1, 2, 1]]), np.array([800, 800]))
    array([  0., 400.])
    """
    size = sizes[parts[:, PIECE]].astype(np.float64)
    taken = np.maximum(parts[:, START] - parts[:, STEP] + 1, 0)
    # A sample is not larger than in the piece of which all may have been read.
    largest = np.min(size[taken > 0] / taken[taken > 0], initial=np.inf)
    left = size - np.where(taken > 0, largest * taken, 0.0) if taken.any() else size
    return np.maximum(left, 0.0) / parts[:, STEP]


def shares(parts: np.ndarray, weights: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Divides parts among ranks, whole ones where there are enough.

    Args:
        parts: of shape (parts, 3).
        weights: of shape (parts,); the ranks' sums will be about alike.
        ranks: how many there are.

    Returns:
        For each rank an array like `parts`. With fewer parts than ranks each has a
        part of all of them.

    Example:

    >>> first, second = shares(whole(3), np.array([5.0, 3.0, 3.0]), 2)
    >>> first[:, PIECE], second[:, PIECE]
    (array([0]), array([1, 2]))
    >>> shares(whole(1), np.array([5.0]), 2)
    [array([[0, 0, 2]]), array([[0, 1, 2]])]
    """
    if len(parts) < ranks:
        return [_every(parts, rank, ranks) for rank in range(ranks)]
    # The largest first, each to the rank that has least.
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
    """Divides large parts, so that all of them can be shared out evenly.

    Args:
        parts: of shape (parts, 3).
        weights: of shape (parts,).
        ranks: how many will share them; a part is not divided into more.

    Returns:
        The same samples in more parts, and the weights of these.

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
    """Every `ranks`-th place of each part; which rank begins goes round."""
    result = parts.copy()
    first = (rank + np.arange(len(parts))) % ranks
    result[:, START] += first * parts[:, STEP]
    result[:, STEP] *= ranks
    return result
