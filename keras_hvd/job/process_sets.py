"""Process sets: collectives of only some ranks."""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from keras_hvd.job import arrival, basics, later_jobs, native, said_once

# None only for a set of no job, or on ranks that are no members. Type checkers must not
# make all other callers check for it. The name is that of typeshed.
MaybeNone: TypeAlias = Any

# The engine's ranks have 32 bits.
_MOST = 2**31 - 1


class ProcessSet:
    """Some of the job's ranks, which run collectives among themselves.

    It can be used once it is part of the job: given to `init`, or to `add_process_set`,
    on all ranks alike. Before that, after `remove_process_set` and after `shutdown`,
    its `process_set_id` is None.

    Args:
        ranks_or_comm: the members' ranks, in any order; not a communicator.

    Raises:
        TypeError: `ranks_or_comm` is not a sequence of whole numbers.
        ValueError: it is empty, has a rank twice, or one that no job has.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.ProcessSet([2, 0])
    ProcessSet(process_set_id=None, ranks=[0, 2])
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        self._ranks: list[int] | None = _ascending(ranks_or_comm)
        self._number: int | None = None
        self._epoch: basics.Epoch | None = None  # in which it was added
        self._removed = False

    @property
    def process_set_id(self) -> int | None:
        """Its number, the same on all ranks; None while it is in no job."""
        if self._number is None or self._epoch != basics.epoch():
            return None
        return self._number if basics.is_initialized() else None

    @property
    def ranks(self) -> list[int] | MaybeNone:
        """The members' ranks, ascending; None for all ranks outside a job."""
        return None if self._ranks is None else list(self._ranks)

    def included(self) -> bool | None:
        """Whether this process is a member; None while the set is in no job.

        False once the set has been removed.
        """
        if self.process_set_id is None:
            return False if self._removed else None
        return self._place() is not None

    @property
    def mpi_comm(self) -> None:
        """None, as for Horovod's sets that are made from ranks."""
        return None

    def size(self) -> int | MaybeNone:
        """The number of members; None while the set is in no job."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | MaybeNone:
        """This process' place among the members, from 0; None if it is not a member."""
        return None if self.process_set_id is None else self._place()

    def _place(self) -> int | None:
        rank, ranks = basics.rank(), self.ranks
        return ranks.index(rank) if rank in ranks else None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __str__(self) -> str:
        return f"{repr(self)[:-1]}, mpi_comm={self.mpi_comm})"


class _GlobalProcessSet(ProcessSet):
    """All ranks of this process' job."""

    def __init__(self) -> None:
        pass

    @property
    def process_set_id(self) -> int:
        return 0

    def __reduce__(self) -> str:
        # Each process has exactly one, also after unpickling.
        return "global_process_set"

    @property
    def ranks(self) -> list[int] | MaybeNone:
        later_jobs.note_read("size", sys._getframe(1))
        if not basics.is_initialized():
            return None
        return list(range(basics.size()))

    def included(self) -> bool | None:
        return True if basics.is_initialized() else None

    def size(self) -> int | MaybeNone:
        later_jobs.note_read("size", sys._getframe(1))
        return basics.size() if basics.is_initialized() else None

    def rank(self) -> int | MaybeNone:
        later_jobs.note_read("rank", sys._getframe(1))
        return basics.rank() if basics.is_initialized() else None


global_process_set = _GlobalProcessSet()
_last_epoch_with_sets: basics.Epoch | None = None


def job_has_sets() -> bool:
    """Whether process sets were added to this process' job.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> job_has_sets()
    False
    """
    return _last_epoch_with_sets == basics.epoch()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a process set part of the job.

    Every rank calls it, also ranks outside the set, with the same ranks and in the same
    order as other calls of it and of `remove_process_set`. It returns when all have
    called.

    Args:
        process_set: the set, or its ranks.

    Returns:
        The set, which can now be given to collectives.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: it is neither a `ProcessSet` nor ranks.
        ValueError: the set is already part of the job.
        MismatchError: the ranks' calls differ, another set has the same ranks, or the
            job has no such rank.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.add_process_set([0])
    Traceback (most recent call last):
    keras_hvd.exceptions.MismatchError: ... process set 0 already has rank 0. No two ...
    """
    arrival.require_arrived("add_process_set")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.process_set_id is not None:
        raise ValueError(f"add_process_set: {process_set} is part of the job already")
    ranks = process_set.ranks
    number = ctypes.c_int32()
    basics.check(
        native.engine().khvd_add_process_set(
            (ctypes.c_int32 * len(ranks))(*ranks), len(ranks), ctypes.byref(number)
        )
    )
    global _last_epoch_with_sets
    process_set._number = number.value
    process_set._epoch = _last_epoch_with_sets = basics.epoch()
    process_set._removed = False
    said_once.speak_for(number.value, ranks)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set from the job.

    Every rank calls it, also ranks outside the set, in the same order as other calls of
    it and of `add_process_set`. It returns when all have called.

    Args:
        process_set: a set that was added.

    Returns:
        Whether it was removed: False, at once, for a set that is not part of the job
        and for `global_process_set`.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: it is not a `ProcessSet`.
        MismatchError: the ranks' calls differ, or a collective of the set waits for a
            rank.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.remove_process_set(keras_hvd.ProcessSet([0]))
    False
    """
    basics.require_initialized("remove_process_set")
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"remove_process_set takes a keras_hvd.ProcessSet, got {process_set!r}"
        )
    number = process_set.process_set_id
    if not number:
        return False
    basics.prepare_end(number)
    basics.check(native.engine().khvd_remove_process_set(number))
    said_once.fall_silent(number)
    process_set._number = None
    process_set._removed = True
    return True


def check_for_init(process_sets: Any) -> list[ProcessSet]:
    """Checks the `process_sets` of `init`, and returns the sets to add."""
    if process_sets is None or isinstance(process_sets, str):
        sets: list[Any] = [] if process_sets in (None, "dynamic") else [process_sets]
    else:
        sets = list(process_sets)
    if not all(isinstance(each, ProcessSet) for each in sets):
        raise TypeError(
            "init: process_sets must be a list of keras_hvd.ProcessSet, or 'dynamic'; "
            f"got {process_sets!r}"
        )
    for i, each in enumerate(sets):
        if any(each.ranks == other.ranks for other in sets[:i]):
            raise ValueError(f"init: process_sets has {each} twice")
    return sets


def number_of(process_set: ProcessSet, function: str) -> int:
    """The engine's number of a process set; raises if it is not part of the job.

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
    beyond = not numbers or numbers[0] < 0 or numbers[-1] > _MOST
    if beyond or len(set(numbers)) < len(numbers):
        raise ValueError(
            "a process set has at least one rank, none of them twice, negative or "
            f"above {_MOST}; got {ranks!r}"
        )
    return numbers
