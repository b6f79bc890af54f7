"""The places for ranks of a job whose ranks come and go, on one host or several."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from keras_hvd.launch import hosts, places
from keras_hvd.launch.hosts import HostSlots


@dataclass(frozen=True)
class Slot:
    """A place for a rank.

    Args:
        host: its name; "" if there is only this one.
        number: among those of the host.
    """

    host: str
    number: int


class Slots:
    """Those of a job, by the numbers of the ranks that are started in them.

    Args:
        named: the hosts that there are.
        known: the `known` of an earlier object, whose numbers stay.

    Example:

    >>> slots = Slots([HostSlots("node0", 2), HostSlots("node1", 1)])
    >>> slots[2], slots.place([1, 2], 1)["KERAS_HVD_LOCAL_SIZE"]
    (Slot(host='node1', number=0), '1')
    >>> slots.change([HostSlots("node2", 1), HostSlots("node0", 1)])
    >>> [*slots]
    [0, 3]
    >>> [*Slots([HostSlots("node1", 1)], slots.known)]
    [2]
    """

    def __init__(
        self, named: Sequence[HostSlots], known: Iterable[tuple[str, int]] = ()
    ):
        self._known = [Slot(*each) for each in known]
        self._numbers = {slot: number for number, slot in enumerate(self._known)}
        self._now: set[int] = set()
        self.change(named)

    def __getitem__(self, number: int) -> Slot:
        return self._known[number]

    def __iter__(self) -> Iterator[int]:
        """The numbers of those that there are now."""
        return iter(sorted(self._now))

    def __contains__(self, number: int) -> bool:
        return number in self._now

    @property
    def known(self) -> list[tuple[str, int]]:
        """All that there have been, in the order of their numbers."""
        return [(each.host, each.number) for each in self._known]

    def change(self, named: Sequence[HostSlots]) -> None:
        """Takes another list of hosts. A slot that it also has keeps its number."""
        self._now.clear()
        for host in named:
            for place in range(host.slots or 1):
                slot = Slot(host.name, place)
                if slot not in self._numbers:
                    self._numbers[slot] = len(self._known)
                    self._known.append(slot)
                self._now.add(self._numbers[slot])

    def is_here(self, number: int) -> bool:
        """Whether it is on this host."""
        return _is_here(self[number].host)

    def at_host_of(self, number: int) -> list[int]:
        """The numbers of those that there are now on the host of this one."""
        return [each for each in self if self[each].host == self[number].host]

    def count_at(self, number: int) -> int:
        """How many there are on the host of this one."""
        return len(self.at_host_of(number)) or 1

    def place(self, numbers: Sequence[int], rank: int) -> dict[str, str]:
        """A rank's variables in a job of these numbers, in the order of ranks."""
        of_ranks = [self[each].host for each in numbers]
        place = places.variables(of_ranks, rank)
        # The other ones follow when the ranks meet.
        local_rank = int(place["KERAS_HVD_LOCAL_RANK"])
        cross = [host for host, n in Counter(of_ranks).items() if n > local_rank]
        return {
            **place,
            "HOROVOD_CROSS_RANK": str(cross.index(of_ranks[rank])),
            "HOROVOD_CROSS_SIZE": str(len(cross)),
        }


@functools.cache
def _is_here(host: str) -> bool:
    # One that has joined is another one, and no name that could be looked up.
    return not host or ("@" not in host and hosts.is_here(host))
