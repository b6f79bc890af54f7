"""Sets of ranks: a collective may be one of some ranks only."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from keras_hvd import basics


class ProcessSet:
    """Some of the job's ranks, that run collectives among themselves.

    It can be used once it is part of the job, on all ranks alike.

    Args:
        ranks: the ranks of its members, in any order.

    Raises:
        TypeError: `ranks` is not a sequence of whole numbers.
        ValueError: there is no rank in it, one twice, or a negative one.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.ProcessSet([2, 0])
    ProcessSet(process_set_id=None, ranks=[0, 2])
    """

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks: list[int] | None = _ascending(ranks)

    @property
    def ranks(self) -> list[int] | None:
        """The members' ranks, ascending; None for all ranks of no job."""
        return None if self._ranks is None else list(self._ranks)

    def included(self) -> bool | None:
        """Whether this process is a member; None while the set is in no job."""
        return None if self.process_set_id is None else self._place() is not None

    def size(self) -> int | None:
        """The number of members; None while the set is in no job."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process' place among the members, from 0; None if it is not one."""
        return None if self.process_set_id is None else self._place()

    def _place(self) -> int | None:
        rank, ranks = basics.rank(), self.ranks
        return ranks.index(rank) if rank in ranks else None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks, of whatever job this process is in."""

    process_set_id = 0

    def __init__(self) -> None:
        self._ranks = None

    def __reduce__(self) -> str:
        # There is one in each process: that is what a copy is.
        return "global_process_set"

    @property
    def ranks(self) -> list[int] | None:
        if not basics.is_initialized():
            return None
        return list(range(basics.size()))

    def included(self) -> bool | None:
        return True if basics.is_initialized() else None

    def size(self) -> int | None:
        return basics.size() if basics.is_initialized() else None

    def rank(self) -> int | None:
        return basics.rank() if basics.is_initialized() else None


global_process_set = _GlobalProcessSet()


def number_of(process_set: ProcessSet, function: str) -> int:
    """What the engine knows a process set by.

    Args:
        process_set: what the user gave.
        function: the public function that it was given to, for the message.

    Returns:
        Its `process_set_id`.

    Raises:
        TypeError: it is not a `ProcessSet`.
        ValueError: it is not part of the job.

    Example:

    >>> number_of(global_process_set, "allreduce")
    0
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"{function}: process_set must be a keras_hvd.ProcessSet, got "
            f"{process_set!r}"
        )
    if process_set.process_set_id is None:
        raise ValueError(
            f"{function}: {process_set} is not part of the job: give it to "
            "keras_hvd.add_process_set() or to keras_hvd.init(), on all ranks"
        )
    return process_set.process_set_id


def _ascending(ranks: Any) -> list[int]:
    try:
        numbers = sorted(operator.index(rank) for rank in ranks)
    except TypeError:
        raise TypeError(
            f"a process set is made of ranks, such as [0, 2]; got {ranks!r}"
        ) from None
    if not numbers or numbers[0] < 0 or len(set(numbers)) < len(numbers):
        raise ValueError(
            "a process set has at least one rank, none of them twice or negative; "
            f"got {ranks!r}"
        )
    return numbers
