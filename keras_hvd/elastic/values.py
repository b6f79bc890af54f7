"""Values of many variables, kept on this rank and sent by one, in memory that is there.

New memory takes longer to get from the system than values take to be copied.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from keras_hvd.backends import buckets
from keras_hvd.job import basics
from keras_hvd.job.objects import allgather_object, broadcast_array

_NAME = "keras_hvd/elastic/variables"

_COMPARED_AT_ONCE = 2**20


def copied(value: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
    """A copy, in the memory of an earlier one if that has the same shape.

    >>> kept = copied(np.ones(2), None)
    >>> copied(np.zeros(2), kept) is kept, kept
    (True, array([0., 0.]))
    """
    if kept is None or kept.shape != value.shape:
        return np.array(value)
    np.copyto(kept, value)
    return kept


def differing(values: Sequence[np.ndarray], root_rank: int) -> list[int]:
    """The places of the values that some rank has otherwise than the root.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> differing([np.ones(2)], root_rank=0)
    []
    """
    mine = [zlib.crc32(_bytes_of(each).data) for each in values]
    of_ranks = allgather_object(mine, name=f"{_NAME}/checksums")
    of_root = of_ranks[root_rank]
    return [
        place
        for place, of_value in enumerate(zip(*of_ranks, strict=True))
        if {*of_value} != {of_root[place]}
    ]


def from_root(
    mine: Sequence[np.ndarray], root_rank: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Gives the root's values that this rank has otherwise, each with its place.

    A value is good until the next one is asked for. All ranks ask for all.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> [*from_root([np.ones(2)], root_rank=0)]
    []
    """
    sizes = [each.nbytes for each in mine]
    large = [[place] for place, size in enumerate(sizes) if size >= buckets.LARGE]
    parts = [*buckets.by_size(sizes, large, last_first=False)]
    lengths = [sum(sizes[place] for place in part) for part in parts]
    room = np.empty(max(lengths, default=0), np.uint8)
    is_root = basics.rank() == root_rank
    for number, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        own = [_bytes_of(mine[place]) for place in part]
        sent = room[:length]
        if is_root:
            # One that is large is alone, and is sent from where it is.
            sent = own[0] if len(own) == 1 else np.concatenate(own, out=sent)
        broadcast_array(sent, root_rank, f"{_NAME}/{number}")
        ends = np.cumsum([each.size for each in own])
        for place, end in zip(part, ends, strict=True):
            value = sent[end - sizes[place] : end]
            if not (is_root or _are_same(_bytes_of(mine[place]), value)):
                yield place, value.view(mine[place].dtype).reshape(mine[place].shape)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _are_same(first: np.ndarray, other: np.ndarray) -> bool:
    """Whether the same bytes are in two arrays; takes little memory.

    >>> _are_same(np.ones(2, np.uint8), np.zeros(2, np.uint8))
    False
    """
    return all(
        np.array_equal(first[at:][:_COMPARED_AT_ONCE], other[at:][:_COMPARED_AT_ONCE])
        for at in range(0, len(first), _COMPARED_AT_ONCE)
    )
