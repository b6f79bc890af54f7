"""When ranks that have ended are started again."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

# The times in a row that one ends before it has joined.
_MOST_FAILURES = 3


class Starts:
    """The ranks that are to be started, each by its number, and those that are new.

    Args:
        cooldown: the seconds before the first time that one is started again, and the
            most before a later one, which waits twice as long as the one before; None:
            none is.
        are_allowed: whether others may be started, in places that are free.
        first: those that are started at the beginning.
        clock: tells the seconds, as `time.monotonic` does.

    Example:

    >>> starts = Starts((60.0, 100.0), False, first=range(3), clock=lambda: 7.0)
    >>> starts.again(2), starts.to_come
    ('; it is started again after 60 s', 1)
    >>> [*starts.due(66.0)], [*starts.due(67.0)]
    ([], [2])
    >>> starts.begin(2)
    >>> starts.again(2), starts.count(2)
    ('; it is started again after 100 s', 2)
    """

    def __init__(
        self,
        cooldown: tuple[float, float] | None,
        are_allowed: bool,
        first: Iterable[int],
        clock: Callable[[], float],
    ):
        self._clock = clock
        self._cooldown = cooldown
        self.are_allowed = are_allowed or cooldown is not None
        """Whether any may be started so far."""
        self._given_up: set[int] = set()
        # Those of hosts that are left out, and until when.
        self._not_before: dict[int, float] = {}
        self._left_out: collections.Counter[str] = collections.Counter()
        self._times: dict[int, float] = {}
        self._new: set[int] = set()
        self._ends: collections.Counter[int] = collections.Counter()
        self._counts = collections.Counter(first)
        # Ends in a row without having joined.
        self._failures: collections.Counter[int] = collections.Counter()

    @property
    def are_repeated(self) -> bool:
        """Whether one that has ended is started again."""
        return self.are_allowed and self._cooldown is not None

    @property
    def scheduled(self) -> int:
        """How many wait for their start."""
        return len(self._times)

    @property
    def to_come(self) -> int:
        """How many may still join."""
        return len(self._times) + len(self._new)

    @property
    def next_time(self) -> float | None:
        """When the next one is due, by the clock."""
        return min(self._times.values(), default=None)

    def count(self, number: int) -> int:
        """How often this one was started."""
        return self._counts[number]

    def again(self, number: int) -> str:
        """Notes that one has ended; says when it is started again, or why not."""
        if number in self._new:
            self._new.remove(number)
            self._failures[number] += 1
            if self._failures[number] == _MOST_FAILURES:
                self._given_up.add(number)
                return f"; it is not started again, after {_MOST_FAILURES} such ends"
        if self._cooldown is None:
            self._given_up.add(number)
            return ""
        seconds = self._seconds(self._ends[number])
        self._ends[number] += 1
        self._times[number] = self._clock() + seconds
        return f"; it is started again after {seconds:g} s"

    def leave_out(self, host: str, numbers: Iterable[int]) -> str:
        """Starts none of a host's for a while: others may take their places.

        Returns what to say of it, or "" if none is started again in any case.

        Example:

        >>> starts = Starts((60.0, 300.0), False, first=range(2), clock=lambda: 7.0)
        >>> starts.again(1)
        '; it is started again after 60 s'
        >>> starts.leave_out("node1", [1])
        '; no rank is left on node1, which is left out for 60 s'
        >>> starts.scheduled, starts.earliest(1)
        (0, 67.0)
        """
        if self._cooldown is None:
            return ""
        seconds = self._seconds(self._left_out[host])
        self._left_out[host] += 1
        until = self._clock() + seconds
        for number in numbers:
            self._not_before[number] = max(until, self._times.pop(number, until))
        name = host or "this host"
        return f"; no rank is left on {name}, which is left out for {seconds:g} s"

    def _seconds(self, times: int) -> float:
        """How long it takes after so many earlier times."""
        assert self._cooldown is not None, "or none is started again"
        first, most = self._cooldown
        return min(first * 2.0 ** min(times, 64), most)

    def earliest(self, number: int) -> float:
        """When one may be started that is not to be so far."""
        return max(self._clock(), self._not_before.get(number, 0.0))

    def may_begin(self, number: int) -> bool:
        """Whether one that does not run may be started in a place that is free."""
        is_to_come = number in self._times or number in self._new
        return not is_to_come and number not in self._given_up

    def soon(self, number: int) -> None:
        """Notes that one is to be started, as soon as may be."""
        self._times[number] = self.earliest(number)

    def cancel(self, number: int) -> None:
        """Notes that one is not to be started so far."""
        self._times.pop(number, None)
        self._new.discard(number)

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

    def forgive(self, number: int) -> None:
        """Notes that one's place is there again, whatever has happened before."""
        self._given_up.discard(number)
        self._not_before.pop(number, None)
        self._times.pop(number, None)
        self._failures[number] = 0

    def give_up(self, number: int) -> None:
        """Notes that one could not be started."""
        self._new.discard(number)
        self._given_up.add(number)

    def stop(self) -> list[int]:
        """From now on none is started. Returns those that were to be."""
        were_to_be = [*self._times]
        self.are_allowed = False
        self._times.clear()
        self._new.clear()
        return were_to_be

    def record(self) -> dict[str, Any]:
        """What another one needs to go on from here. Times begin anew."""
        return {
            "counts": [*self._counts.items()],
            "given_up": sorted(self._given_up),
            "are_allowed": self.are_allowed,
        }

    def resume(self, record: Mapping[str, Any], new: Iterable[int]) -> None:
        """Goes on from a record. `new` are those that run and have not joined."""
        self._counts = collections.Counter(dict(record["counts"]))
        self._given_up = {*record["given_up"]}
        self.are_allowed = record["are_allowed"]
        self._new = {*new}
