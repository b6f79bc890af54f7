"""Refuses objects made for a rank's place in a job in any other job."""

from __future__ import annotations

from keras_hvd.backends.current import framework
from keras_hvd.job import basics
from keras_hvd.job.process_sets import ProcessSet, number_of

_REMEDY = (
    "After keras_hvd.init(), make a new keras_hvd.Strategy(), and models and datasets "
    "with it"
)


class Membership:
    """A rank's place in a process set when an object was made for it.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> Membership(keras_hvd.global_process_set).require_same("dataset")
    """

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self.size: int = process_set.size()
        self.rank: int = process_set.rank()

    def require_same(self, what: str, remedy: str = _REMEDY) -> None:
        """Raises RuntimeError if the place is another, in another job.

        Raises ValueError if the process set is not part of the job any more. A function
        being traced makes the same check when it runs.
        """
        # Outside of a job there is no other rank, and collectives say so.
        if not basics.is_initialized():
            return
        process_set = self._process_set
        number = number_of(process_set, what)
        if (process_set.size(), process_set.rank()) == (self.size, self.rank):
            framework.require_as_traced("size", "rank", process_set=number)
            return
        raise RuntimeError(
            f"this {what} was made by rank {self.rank} of {self.size}, and is used by "
            f"rank {basics.rank()} of {basics.size()}, in another job, for which it "
            f"would be wrong. {remedy}"
        )
