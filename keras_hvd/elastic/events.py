"""What may happen to an elastic job on purpose, and when it may survive that."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = {
    "kill": "SIGKILL of a rank",
    "pair": "SIGKILL of two ranks, one shortly after the other",
    "stop": "SIGSTOP of a rank, and SIGCONT a while later",
    "late": "SIGSTOP of a rank, SIGKILL of another, and SIGCONT of the first",
    "new": "SIGKILL of a rank that was started again and has not joined so far",
    "leave": "a host leaves the list of --hosts-file",
    "return": "a host that has left it returns",
}
"""What may happen."""

_RANK = r"khvdrun: rank (\d+) \(.*?\) .*"
_GOES_ON = re.compile(r"khvdrun: the job goes on .* started as (\d+(?:, \d+)*)")
_IS_LOST = re.compile(_RANK + r"; \d+ ranks? (?:is|are) left")
_NEVER_JOINED = re.compile(_RANK + r" before it had joined")
_LEAVES = re.compile(r"khvdrun: rank (\d+) leaves: ")


class Membership:
    """Who is in a job, as its khvdrun says, by the numbers with which ranks started.

    Args:
        ranks: how many there are at first.

    Example:

    >>> job = Membership(3)
    >>> job.hit.add(1)
    >>> job.hear("khvdrun: rank 1 (process 7) was killed by 9; 2 ranks are left")
    >>> job.members, job.goes_on, job.surprises
    ({0, 2}, False, [])
    >>> job.hear("khvdrun: the job goes on ...: those that were started as 0, 2, 1")
    >>> job.members, job.goes_on
    ({0, 1, 2}, True)
    """

    def __init__(self, ranks: int):
        self.members = {*range(ranks)}
        self.goes_on = True
        """Whether none has left it since it was formed."""
        self.hit: set[int] = set()
        """Those that were killed, as far as khvdrun has not said so yet."""
        self.never_joined: set[int] = set()
        """Those whose last process has ended before it had joined."""
        self.surprises: list[str] = []
        """What was said of others that have ended."""

    def hear(self, line: str) -> None:
        """Takes a line of khvdrun, or any other."""
        if found := _GOES_ON.search(line):
            self.members = {*map(int, found[1].split(", "))}
            self.never_joined -= self.members
            self.goes_on = True
        elif found := _LEAVES.search(line):
            self.members.discard(int(found[1]))
            self.goes_on = False
        elif found := _IS_LOST.search(line):
            self.members.discard(int(found[1]))
            self.goes_on = False
            self._note_end(int(found[1]), line)
        elif found := _NEVER_JOINED.search(line):
            self.never_joined.add(int(found[1]))
            self._note_end(int(found[1]), line)

    def _note_end(self, number: int, line: str) -> None:
        if number not in self.hit:
            self.surprises.append(line.strip())
        self.hit.discard(number)


class Hosts:
    """The lines of a file that the job's --host-discovery-script prints.

    Args:
        file: what it has at first is all that there may be: `node0:4` in each line.

    Example:

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "hosts")
    ...     _ = file.write_text("node0:1\\nnode1:2\\n")
    ...     hosts = Hosts(file)
    ...     hosts.toggle("node0:1")
    ...     file.read_text()
    'node1:2\\n'
    >>> hosts.slots, hosts.may_leave(least=1), hosts.away, hosts.ranks_away
    (2, [], ['node0:1'], {0})
    """

    def __init__(self, file: Path):
        self._file = file
        self._all = file.read_text().split()
        self._listed = [*self._all]

    @property
    def slots(self) -> int:
        return sum(map(_slots, self._listed))

    @property
    def away(self) -> list[str]:
        return [line for line in self._all if line not in self._listed]

    @property
    def ranks_away(self) -> set[int]:
        """The numbers with which ranks are started there."""
        of_numbers = [line for line in self._all for _ in range(_slots(line))]
        return {n for n, line in enumerate(of_numbers) if line in self.away}

    def may_leave(self, least: int) -> list[str]:
        """The hosts without which the others have so many slots."""
        return [line for line in self._listed if self.slots - _slots(line) >= least]

    def toggle(self, line: str) -> None:
        """Removes a host, or puts it back."""
        self._list({*self._listed} ^ {line})

    def restore(self) -> None:
        """Puts all back."""
        self._list({*self._all})

    def _list(self, lines: set[str]) -> None:
        self._listed = [each for each in self._all if each in lines]
        new = self._file.with_name(f"{self._file.name}.new")
        new.write_text("".join(f"{each}\n" for each in self._listed))
        new.replace(self._file)


def _slots(line: str) -> int:
    return int(line.partition(":")[2] or 1)


@dataclass(frozen=True)
class Event:
    """What is to happen.

    Args:
        kind: one of `KINDS`.
        killed: the ranks that are killed, in this order.
        stopped: the rank that is stopped before, and goes on a while later.
        host: the line of the host that leaves or returns.

    Example:

    >>> str(Event("late", killed=(2,), stopped=0))
    'late: rank 0 stops, rank 2 is killed'
    """

    kind: str
    killed: tuple[int, ...] = ()
    stopped: int | None = None
    host: str = ""

    def __str__(self) -> str:
        parts = [] if self.stopped is None else [f"rank {self.stopped} stops"]
        parts += [f"rank {number} is killed" for number in self.killed]
        parts += [f"{self.host} {self.kind}s"] if self.host else []
        return f"{self.kind}: {', '.join(parts)}"


def choose(
    chance: random.Random,
    kinds: Sequence[str],
    job: Membership,
    least: int,
    running: Collection[int] = (),
    hosts: Hosts | None = None,
) -> Event | None:
    """An event that leaves enough ranks in the job; None if none of the kinds does.

    Args:
        chance: what chooses.
        kinds: of `KINDS`.
        job: who is in it.
        least: the ranks that must be left.
        running: the ranks that have a process.
        hosts: those that may leave.

    Example:

    >>> str(choose(random.Random(0), ["kill"], Membership(3), least=2))
    'kill: rank 1 is killed'
    >>> choose(random.Random(0), ["pair"], Membership(3), least=2)
    """
    members = chance.sample(sorted(job.members), len(job.members))
    spare = len(members) - least
    # khvdrun gives up a rank that has ended three times in a row without having joined.
    new = sorted({*running} - job.members - job.never_joined)
    of_hosts = {
        "leave": hosts.may_leave(least) if hosts else [],
        "return": hosts.away if hosts else [],
    }
    is_possible = {
        "kill": spare >= 1,
        "pair": spare >= 2,
        "stop": True,
        "late": spare >= 1 and len(members) >= 2,
        "new": bool(new),
        **{kind: bool(lines) for kind, lines in of_hosts.items()},
    }
    possible = [kind for kind in kinds if is_possible[kind]]
    if not possible:
        return None
    kind = chance.choice(possible)
    if kind in of_hosts:
        return Event(kind, host=chance.choice(of_hosts[kind]))
    if kind == "new":
        return Event(kind, (chance.choice(new),))
    if kind == "stop":
        return Event(kind, stopped=members[0])
    if kind == "late":
        return Event(kind, (members[0],), stopped=members[1])
    return Event(kind, tuple(members[: 2 if kind == "pair" else 1]))
