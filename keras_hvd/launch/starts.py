"""When ranks that have ended are started again."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator

# The times in a row that one ends before it has joined.
_MOST_FAILURES = 3


class Starts:
    """The ranks that are to be started, each by its number, and those that are new.

    Args:
        cooldown: the seconds before the first time that one is started again, and the
            most before a later one, which waits twice as long as the one before; None:
            none is.

    Example:

    >>> starts = Starts((60.0, 100.0))
    >>> starts.again(2), starts.to_come
    ('is started again after 60 s', 1)
    >>> [*starts.due(time.monotonic())]
    []
    >>> [*starts.due(time.monotonic() + 60)]
    [2]
    >>> starts.begin(2)
    >>> starts.again(2), starts.count(2)
    ('is started again after 100 s', 2)
    """

    def __init__(self, cooldown: tuple[float, float] | None):
        self._cooldown = cooldown
        self._times: dict[int, float] = {}
        self._new: set[int] = set()
        self._ends: collections.Counter[int] = collections.Counter()
        self._counts: collections.Counter[int] = collections.Counter()
        # Ends in a row without having joined.
        self._failures: collections.Counter[int] = collections.Counter()

    @property
    def are_allowed(self) -> bool:
        return self._cooldown is not None

    @property
    def to_come(self) -> int:
        """How many may still join."""
        return len(self._times) + len(self._new)

    @property
    def next_time(self) -> float | None:
        """When the next one is due, by `time.monotonic`."""
        return min(self._times.values(), default=None)

    def count(self, number: int) -> int:
        """How often this one was started."""
        return 1 + self._counts[number]

    def again(self, number: int) -> str:
        """Notes that one has ended; says when it is started again, or why not."""
        assert self._cooldown is not None, "or none is"
        if number in self._new:
            self._new.remove(number)
            self._failures[number] += 1
            if self._failures[number] == _MOST_FAILURES:
                return f"is not started again, after {_MOST_FAILURES} such ends"
        first, most = self._cooldown
        seconds = min(first * 2.0 ** min(self._ends[number], 64), most)
        self._ends[number] += 1
        self._times[number] = time.monotonic() + seconds
        return f"is started again after {seconds:g} s"

    def due(self, now: float) -> Iterator[int]:
        """Those whose time has come."""
        for number, at in [*self._times.items()]:
            if at <= now:
                yield number

    def begin(self, number: int) -> None:
        """Notes that one is started."""
        del self._times[number]
        self._new.add(number)
        self._counts[number] += 1

    def note_joined(self, number: int) -> None:
        """Notes that a new one is in the job."""
        self._new.discard(number)
        self._failures[number] = 0

    def give_up(self, number: int) -> None:
        """Notes that one could not be started."""
        self._new.discard(number)

    def stop(self) -> list[int]:
        """From now on none is started. Returns those that were to be."""
        were_to_be = [*self._times]
        self._cooldown = None
        self._times.clear()
        self._new.clear()
        return were_to_be
