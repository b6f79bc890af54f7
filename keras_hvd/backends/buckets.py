"""Buckets: tensors that are ready at about the same time are sent together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# The bytes with which a bucket ends. That is large enough to be worth a collective, and
# small enough to send the last layers' gradients while backprop works on the first.
LARGE = 4 << 20


def by_size(
    sizes: Sequence[int],
    groups: Sequence[Sequence[int]] = (),
    *,
    last_first: bool = True,
) -> Iterator[list[int]]:
    """Yields buckets of indices, from last to first: backprop finishes in that order.

    Each group in `groups` stays whole, and is yielded when its last index comes up.

    >>> list(by_size([1 << 20, 3 << 20, 9 << 20, 1 << 10]))
    [[3, 2], [1, 0]]
    >>> list(by_size([1 << 20, 3 << 20, 9 << 20, 1 << 10], [[0, 2]]))
    [[2, 0], [3, 1]]
    >>> list(by_size([1 << 20, 3 << 20, 9 << 20, 1 << 10], last_first=False))
    [[0, 1], [2], [3]]
    """
    of_index = {i: sorted(group, reverse=last_first) for group in groups for i in group}
    bucket: list[int] = []
    filled = 0
    for i in sorted(range(len(sizes)), reverse=last_first):
        if i in of_index:
            if i == of_index[i][0]:
                yield of_index[i]
            continue
        bucket.append(i)
        filled += sizes[i]
        if filled >= LARGE:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


def by_number(count: int, buckets: int) -> Iterator[list[int]]:
    """Yields up to `buckets` buckets, with about the same number of indices in each.

    >>> list(by_number(5, 2)), list(by_number(2, 3))
    ([[4, 3, 2], [1, 0]], [[1], [0]])
    """
    ends = [count * bucket // buckets for bucket in reversed(range(buckets + 1))]
    for end, start in zip(ends, ends[1:]):
        if start < end:
            yield list(range(end - 1, start - 1, -1))
