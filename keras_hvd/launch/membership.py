"""The state machine of an elastic job: which ranks it has, and who is told what.

It has no processes, no connections and no clock of its own. Starts and ends of
processes, their words and lists of hosts go in; acts come out, for `launch/elastic.py`
or `launch/membership_service.py` to do in their order.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_hvd.launch.hosts import HostSlots
from keras_hvd.launch.options import Options
from keras_hvd.launch.slots import Slots
from keras_hvd.launch.starts import Starts
from keras_hvd.world.launchers.variables import RENDEZVOUS

# Variables of a rank that is alone, which follow when ranks of several hosts meet.
_ALONE = {"KERAS_HVD_CROSS_RANK": "0", "KERAS_HVD_CROSS_SIZE": "1"}
_FOLLOWS = dict.fromkeys(_ALONE, "")

# The times in a row that all ranks are there and cannot join.
_MOST_TRIES = 3

# Once one rank has found that it cannot join, the others find it within this time.
_GRACE_SECONDS = 5


@dataclass(frozen=True)
class Limits:
    """What the options of an elastic job say.

    Args:
        least: the fewest ranks that it goes on with.
        most: the most that it has.
        timeout: seconds that ranks are waited for.
        resets: the most times that it goes on with other ranks; None for any.
    """

    least: int
    most: int
    timeout: float
    resets: int | None = None


@dataclass(frozen=True)
class Start:
    """Start this rank, for the `count`th time."""

    number: int
    count: int


@dataclass(frozen=True)
class Kill:
    """Kill this rank, and say why."""

    number: int
    why: str


@dataclass(frozen=True)
class Tell:
    """Send this rank a message."""

    number: int
    word: str
    rest: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    line: str


class Membership:
    """The ranks of an elastic job, by their numbers as they were started.

    Args:
        job: its name.
        ranks: how many it begins with.
        limits: what its options say.
        slots: the places for ranks.
        starts: when ranks are started.
        clock: tells the seconds, as `time.monotonic` does.
        lists_change: whether lists of other hosts may come.
        meets: whether ranks meet over a network, at an address that one offers.

    Example: rank 0 of two dies, and the other one goes on alone.

    >>> slots = Slots([HostSlots("", 2)])
    >>> starts = Starts(None, are_allowed=False, first=range(2), clock=lambda: 0.0)
    >>> limits = Limits(least=1, most=2, timeout=600.0)
    >>> job = Membership("job", 2, limits, slots, starts, clock=lambda: 0.0)
    >>> job.note_here(0, 1)
    >>> job.note_here(1, 1)
    >>> job.note_end(0, "rank 0 was killed", has_failed=True)
    True
    >>> job.note_waits(1)
    >>> *said, join = job.take_acts()
    >>> said
    [Say(line='rank 0 was killed; 1 rank is left')]
    >>> join.number, join.word, join.rest["variables"]["KERAS_HVD_SIZE"]
    (1, 'join', '1')
    >>> job.note_joined(1, join.rest["job"])
    >>> [type(act).__name__ for act in job.take_acts()], job.members
    (['Tell', 'Say'], [1])
    """

    def __init__(
        self,
        job: str,
        ranks: int,
        limits: Limits,
        slots: Slots,
        starts: Starts,
        clock: Callable[[], float],
        lists_change: bool = False,
        meets: bool = False,
    ):
        self._name = job
        self.job = job
        """The name of the job that its ranks are in, or were in last."""
        self._limits = limits
        self._slots = slots
        self._starts = starts
        self._clock = clock
        self._lists_change = lists_change
        self._meets = meets
        self.members = [*range(ranks)]
        """Those in the job: the first is its rank 0."""
        self.lost: list[int] = []
        """Those that have failed since it last went on."""
        self._acts: collections.deque[Start | Kill | Tell | Say] = collections.deque()
        self._running = {*self.members}
        self._killed: set[int] = set()
        # Those that are to leave, and by when they are to have ended.
        self._leavers: dict[int, float] = {}
        # Those that run the function, and of them those that are in no job.
        self._here: set[int] = set()
        # By whether they have the state of the training.
        self._waiting: dict[int, bool] = {}
        # For how many functions, one after another, each has called.
        self._turns = dict.fromkeys(self.members, 0)
        # The ranks that new ones are about to have.
        self._to_come: dict[int, int] = {}
        # Where ranks can meet if this one is rank 0.
        self._offered: dict[int, str] = {}
        self._joining: list[int] = []  # those that have places in the next job
        self._joined_next: set[int] = set()
        self._could_not: dict[int, str] = {}
        self._are_late = False
        self._next = ""  # the job that they are joining
        self._formed = 0
        self._changes = 0
        self._tries = 0
        self._has_met = False
        self._broken_at: float | None = None
        self._deadline = math.inf
        self._interrupt = ""
        self._why_over = ""  # why there is no next job

    @classmethod
    def of_options(
        cls,
        options: Options,
        job: str,
        slots: Slots,
        clock: Callable[[], float],
        lists_change: bool,
        meets: bool,
    ) -> Membership:
        """That of a job that begins with these options; the rest as the class."""
        assert options.least_ranks is not None, "or it is no such job"
        assert options.elastic_timeout is not None, "or it is no such job"
        most = options.most_ranks or options.ranks
        limits = Limits(
            *(options.least_ranks, most, options.elastic_timeout, options.reset_limit)
        )
        may_grow = lists_change or len([*slots]) > options.ranks
        starts = Starts(options.cooldown_range, may_grow, range(options.ranks), clock)
        given = job, options.ranks, limits, slots, starts, clock
        return cls(*given, lists_change, meets)

    # ---- What comes out

    def take_acts(self) -> Iterable[Start | Kill | Tell | Say]:
        """What is to be done, in this order; each is taken once."""
        while self._acts:
            yield self._acts.popleft()

    @property
    def generation(self) -> int:
        """The number of the job that its ranks are in, or were in last, from 1."""
        return self._changes + 1

    @property
    def next_time(self) -> float:
        """When `act` has something to do; infinite if it has not."""
        starts_at = self._starts.next_time
        return min(
            self._deadline,
            math.inf if starts_at is None else starts_at,
            *self._leavers.values(),
            math.inf,
        )

    @property
    def may_start(self) -> bool:
        """Whether ranks may be started now, so that lists of hosts count."""
        return self._has_met and self._starts.are_allowed and not self._is_at_limit

    def is_new(self, number: int) -> bool:
        """Whether this one has not joined so far."""
        return number not in self.members and number not in self._leavers

    def start_of(self, number: int) -> tuple[dict[str, str], dict[str, Any]]:
        """The variables with which a rank is started, and what its `Renewal` has."""
        is_new = self.is_new(number)
        own = [number] if is_new else self.members
        variables = self._slots.place(own, own.index(number))
        if is_new:
            # It is alone until it calls the function.
            job = f"{self._name}.{number}.{self._starts.count(number)}"
            variables |= {"KERAS_HVD_JOB": job, **_ALONE}
        else:
            variables |= {
                "KERAS_HVD_JOB": self._name,
                "KERAS_HVD_REQUIRE_SIZE": str(len(own)),
                **(_FOLLOWS if self._meets else {}),
            }
        return variables, {
            "number": number,
            "slot": self._slots[number].number,
            "gains": self._starts.are_allowed,
            "is_new": is_new,
            "rank_to_come": self._rank_to_come(number),
        }

    # ---- Going on elsewhere

    def record(self) -> dict[str, Any]:
        """What another one needs, with what the ranks tell, to go on from here."""
        return {
            "members": [*self.members],
            "current": self.job,
            "formed": self._formed,
            "changes": self._changes,
            "has_met": self._has_met,
            "to_come": [*self._to_come.items()],
            "starts": self._starts.record(),
        }

    def resume(
        self, record: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Goes on from a record.

        Args:
            record: the result of `record`.
            ranks: those that run, by their numbers, and of each: `turn`; `is_here`,
                whether it runs that function; `waits`, what it offered as it asked for
                a place, and whether it has the state, or None; `joined`, the job that
                it has joined since; and `leaves`, whether it was told so.

        Members that do not run are taken to do so until `note_end`.
        """
        self.members = [*record["members"]]
        self.job, self._formed = record["current"], record["formed"]
        self._changes, self._to_come = record["changes"], dict(record["to_come"])
        self._starts.resume(record["starts"], ranks.keys() - {*self.members})
        is_here = any(each["is_here"] for each in ranks.values())
        self._has_met = record["has_met"] or is_here
        self._running = {*self.members, *ranks}
        self._turns = dict.fromkeys(self.members, 0)
        for number, rank in ranks.items():
            self._turns[number] = rank["turn"]
            if rank["is_here"]:
                self._here.add(number)
            if rank["leaves"]:
                self._leavers[number] = self._clock() + self._limits.timeout
                self.members = [each for each in self.members if each != number]
        for number, rank in ranks.items():
            if rank["waits"] is None or rank["leaves"]:
                continue
            if number in self.members and rank["joined"] == self.job:
                # The others have gone on with it, and it was not told so far.
                self._tell(number, "go")
            else:
                self.note_waits(number, *rank["waits"])
        if not self._starts.are_allowed:
            self._start_no_more("and none is wanted any more")
        if self._broken_at is None and (self._new_ones_wait or self._leaving):
            self._tell_of_others()

    # ---- What goes in

    def note_met(self) -> None:
        """The ranks of the first job know each other."""
        self._has_met = True

    def note_here(self, number: int, turn: int) -> None:
        """A rank runs a function, its `turn`th one."""
        # Ranks on other hosts tell so here alone.
        self._has_met = True
        if number not in self._running:
            # It has ended since it said so.
            return
        self._here.add(number)
        self._turns[number] = turn
        self._refuse_late_ones()
        if number in self.members and (self._new_ones_wait or self._leaving):
            self._tell(number, "others")

    def note_gone(self, number: int) -> None:
        """A rank's function has ended, or the rank itself, as is about to be known."""
        self._here.discard(number)
        self._waiting.pop(number, None)

    def note_waits(
        self, number: int, offered: str = "", has_state: bool = True
    ) -> None:
        """A rank is in no job, and wants a place in the next one."""
        if number not in self._here:
            return
        self._offered[number] = offered
        if number not in self.members and not self._starts.are_allowed:
            # It is being killed.
            return
        self._waiting[number] = has_state
        if self._why_over:
            self._tell(number, "end", why=self._why_over)
            return
        if number not in self.members:
            self._refuse_late_ones()
            if self._broken_at is None:
                if self._new_ones_wait:
                    self._tell_of_others()
            elif not self._joining:
                self._form_if_all_wait()
            return
        self._note_break()
        if self._deadline == math.inf:
            # Not before: those that are done need no other, and take their time.
            self._deadline = self._clock() + self._limits.timeout
        self._form_if_all_wait()

    def note_joined(self, number: int, job: str) -> None:
        """A rank has taken its place in a job."""
        if job != self._next or number not in self._joining:
            # It was called off.
            return
        self._joined_next.add(number)
        self._on_answer()

    def note_could_not(self, number: int, job: str, why: str) -> None:
        """A rank could not take its place in a job."""
        if job != self._next or number not in self._joining:
            return
        self._could_not[number] = why
        self._on_answer()

    def note_word(self, number: int, told: Mapping[str, Any]) -> None:
        """A rank has said something, as `world/renewal.py` tells."""
        match told:
            case {"word": "here", "turn": int(turn)}:
                self.note_here(number, turn)
            case {"word": "waits", "at": str(place), "has_state": bool(has_state)}:
                self.note_waits(number, place, has_state)
            case {"word": "joined", "job": str(job)}:
                self.note_joined(number, job)
            case {"word": "could not", "job": str(job), "why": str(why)}:
                self.note_could_not(number, job, why)

    def note_end(self, number: int, what: str, has_failed: bool) -> bool:
        """A rank has ended, `what` tells how. Returns whether the job goes on as one.

        False means that it ends like any other job, of which a rank has ended.
        """
        self._running.discard(number)
        self._killed.discard(number)
        self.note_gone(number)
        if number in self._leavers:
            del self._leavers[number]
        elif number not in self.members:
            self._on_end_of_new(number, what)
        elif has_failed and self._can_lose:
            self._lose(number, what)
        else:
            self._start_no_more("since the training ends")
            if has_failed:
                self._tell_of_end(self._why_it_fails(number))
            elif self._waiting:
                self._form_if_all_wait()
            return False
        return True

    def note_no_start(self, number: int) -> None:
        """A rank could not be started."""
        self._running.discard(number)
        self._starts.give_up(number)
        self._form_if_all_wait()

    def note_hosts(self, named: Sequence[HostSlots]) -> None:
        """There is another list of hosts."""
        if not self._starts.are_allowed:
            return
        known, before = self._leaving, {*self._slots}
        self._slots.change(named)
        for number in {*self._slots} - before:
            self._starts.forgive(number)
        for number in self._new_ones:
            if number not in self._slots:
                self._kill(number, "has not joined, and its host is not listed")
        if self._broken_at is None and not set(known).issuperset(self._leaving):
            self._tell_of_others()

    def interrupt(self, by: str) -> None:
        """The job was told to end: whoever ends from now on is not replaced."""
        self._interrupt = by
        self._start_no_more(f"since khvdrun got {by}")

    def close(self) -> None:
        """The job is ending, whatever its ranks say."""
        self._tell_of_end("it is ending")

    def act(self) -> None:
        """Does what is due by now."""
        now = self._clock()
        for number, leaves_by in [*self._leavers.items()]:
            if now >= leaves_by:
                self._leavers[number] = math.inf
                self._kill(number, f"has not left for {self._limits.timeout:g} s")
        if self.may_start:
            self._fill()
        for number in self._starts.due(now):
            if number not in self._slots:
                # Its host is gone.
                self._starts.cancel(number)
                continue
            self._starts.begin(number)
            self._to_come[number] = self._next_to_come
            self._running.add(number)
            self._acts.append(Start(number, self._starts.count(number)))
        if now >= self._deadline:
            self._deadline = math.inf
            self._on_deadline()

    # ---- Ranks that start and end

    def _fill(self) -> None:
        """Starts ranks in places that are free."""
        running = {number for number in self._running if number in self._slots}
        # Those of hosts that are left out come last.
        for number in sorted(self._slots, key=self._starts.earliest):
            if len(running) + self._starts.scheduled >= self._limits.most:
                return
            if number not in running and self._starts.may_begin(number):
                self._starts.soon(number)

    @property
    def _new_ones(self) -> list[int]:
        return [number for number in sorted(self._running) if self.is_new(number)]

    def _rank_to_come(self, number: int) -> int:
        """The rank that a new one is about to have, unless others come or go."""
        return self._to_come.get(number, len(self.members))

    @property
    def _next_to_come(self) -> int:
        """The first rank after all others that no new one has been told."""
        told = {*map(self._rank_to_come, self._new_ones)}
        return next(n for n in itertools.count(len(self.members)) if n not in told)

    @property
    def _left(self) -> list[int]:
        """The ranks of the job that have not ended, in their order."""
        return [number for number in self.members if number in self._running]

    @property
    def _leaving(self) -> list[int]:
        """Those of the job whose hosts are no longer listed, if they may leave."""
        left = self._left
        gone = [number for number in left if number not in self._slots]
        stay = [number for number in left if number in self._slots]
        # Those that train have it once they commit, and nobody leaves before.
        if not any(self._waiting.get(number, True) for number in stay):
            # The others would have nobody's state.
            return []
        new = sum(number not in self.members for number in self._waiting)
        return gone[: max(0, len(left) + new - self._limits.least)]

    def _on_end_of_new(self, number: int, what: str) -> None:
        """It has never been in the job, which goes on as it is."""
        if number not in self._slots:
            self._starts.cancel(number)
        elif self._starts.are_allowed:
            again = self._again(number)
            self._say(f"{what} before it had joined{again}")
        if number in self._joining or not self._may_become_enough:
            self._form_if_all_wait()

    def _again(self, number: int) -> str:
        """Notes that one has ended; says when it is started again, or why not.

        A host on which no rank is left is left out, if there are others.
        """
        again = self._starts.again(number)
        beside = self._slots.at_host_of(number)
        is_only_host = len(beside) == len([*self._slots])
        if number not in beside or is_only_host or self._running & {*beside}:
            return again
        left_out = self._starts.leave_out(self._slots[number].host, beside)
        return left_out if self._starts.may_begin(number) else again

    def _lose(self, number: int, what: str) -> None:
        self.lost.append(number)
        self.members.remove(number)
        left = len(self._left)
        again = self._again(number) if self._starts.are_allowed else ""
        are = "ranks are" if left > 1 else "rank is"
        self._say(f"{what}; {left} {are} left{again}")
        self._note_break()
        self._form_if_all_wait()

    @property
    def _can_lose(self) -> bool:
        """Whether the job goes on without one that has just failed."""
        left = len(self._left)
        may_come = self._may_come + self._starts.are_repeated
        return (
            self._has_met
            and not self._interrupt
            and not self._why_over
            and left > 0
            and left + may_come >= self._limits.least
            and not self._is_at_limit
        )

    def _why_it_fails(self, number: int) -> str:
        if self._interrupt:
            return f"khvdrun got {self._interrupt}"
        left = len(self._left)
        why = f"--reset-limit {self._limits.resets} is reached"
        if left < self._limits.least:
            why = f"{left} are fewer than --min-np {self._limits.least}"
        return f"rank {number} has ended, and {why}"

    @property
    def _is_at_limit(self) -> bool:
        limit = self._limits.resets
        return limit is not None and self._changes >= limit

    @property
    def _may_become_enough(self) -> bool:
        return len(self._left) + self._may_come >= self._limits.least

    @property
    def _may_come(self) -> int:
        """How many ranks may join, as far as is known."""
        if not self._starts.are_allowed:
            return 0
        if self._lists_change:
            return self._limits.most
        free = [number for number in self._slots if number not in self._running]
        return self._starts.to_come + sum(map(self._starts.may_begin, free))

    def _start_no_more(self, why: str) -> None:
        """Ends the ranks that are not in the job, and starts no other."""
        for number in self._starts.stop():
            self._say(f"rank {number} is not started again, {why}")
        for number in self._new_ones:
            self._kill(number, f"had not joined, {why}")

    def _kill(self, number: int, why: str) -> None:
        if number not in self._running or number in self._killed:
            return
        self._killed.add(number)
        self._waiting.pop(number, None)
        self._acts.append(Kill(number, why))

    # ---- The next job

    def _note_break(self) -> None:
        if self._broken_at is None:
            self._broken_at = self._clock()

    def _refuse_late_ones(self) -> None:
        """Ends new ranks that call a function which those of the job have left."""
        reached = max(self._turns[number] for number in self.members)
        for number in [*self._waiting]:
            if number not in self.members and self._turns[number] < reached:
                del self._waiting[number]
                why = (
                    f"rank {number} calls function {self._turns[number]} of "
                    f"elastic.run, and the others call function {reached}: a rank can "
                    "come only while the first one runs"
                )
                self._tell(number, "end", why=why)

    @property
    def _new_ones_wait(self) -> bool:
        return any(number not in self.members for number in self._waiting)

    @property
    def _all_wait(self) -> bool:
        return all(number in self._waiting for number in self._left)

    def _form_if_all_wait(self) -> None:
        if self._why_over or not self._left or not self._all_wait:
            return
        if len(self._waiting) - len(self._leaving) >= self._limits.least:
            self._tries = 0
            self._form()
        elif self._may_become_enough:
            # What they say of a job that they were joining counts no more.
            self._joining.clear()
            self._next = ""
            timeout = self._limits.timeout
            if self._deadline == math.inf:
                self._deadline = self._clock() + timeout
            wait = "ranks wait" if len(self._waiting) > 1 else "rank waits"
            self._say(
                f"{len(self._waiting)} {wait} for others, at most {timeout:g} s "
                "(--elastic-timeout)"
            )
        else:
            self._tell_of_end(self._too_few)

    @property
    def _too_few(self) -> str:
        return f"{len(self._waiting)} are fewer than --min-np {self._limits.least}"

    def _form(self) -> None:
        """Gives places to the ranks of the job, in their order, then to new ones."""
        self._tries += 1
        self._formed += 1
        self._next = f"{self._name}.{self._formed}"
        self._deadline = self._clock() + self._limits.timeout
        self._joined_next.clear()
        self._could_not.clear()
        self._are_late = False
        leaving = self._leaving
        of_job = [number for number in self._left if number not in leaving]
        new = [number for number in self._waiting if number not in self.members]
        new.sort(key=self._rank_to_come)
        self._joining = [*of_job, *new]
        for number in leaving:
            self._let_leave(number)
        of_job_to_come = {"KERAS_HVD_JOB": self._next}
        if self._meets:
            place = self._offered[self._joining[0]]
            of_job_to_come |= {**_FOLLOWS, RENDEZVOUS: place}
        for at, number in enumerate(self._joining):
            variables = {**self._slots.place(self._joining, at), **of_job_to_come}
            self._tell(
                *(number, "join"),
                job=self._next,
                variables=variables,
                generation=self.generation + 1,
            )

    def _let_leave(self, number: int) -> None:
        self._say(
            f"rank {number} leaves: {self._slots[number].host} is not listed any more"
        )
        self._leavers[number] = self._clock() + self._limits.timeout
        self.members.remove(number)
        del self._waiting[number]
        self._tell(number, "leave")

    def _on_answer(self) -> None:
        """Goes on once all have said whether they could take their places."""
        if self._silent:
            if self._could_not:
                soon = self._clock() + _GRACE_SECONDS
                self._deadline = min(self._deadline, soon)
        elif self._could_not:
            self._on_failed_join(", ".join({*self._could_not.values()}))
        else:
            self._go()

    def _go(self) -> None:
        self._changes += 1
        self.job = self._next
        self._deadline = math.inf
        # The report of a later end is not about them.
        self.lost.clear()
        for number in self._joining:
            del self._waiting[number]
            self._tell(number, "go")
        new = [number for number in self._joining if number not in self.members]
        for number in new:
            self._starts.note_joined(number)
        assert self._broken_at is not None, "or nobody would have waited"
        seconds = self._clock() - self._broken_at
        self._broken_at = None
        self._say(
            f"the job goes on with {len(self._joining)} of {self._limits.most} ranks "
            f"after {seconds:.2f} s: those that were started as "
            f"{_listed(self._joining)}{_new(new)}"
        )
        self.members, self._joining = self._joining, []
        if self._is_at_limit:
            limit = self._limits.resets
            self._start_no_more(f"since --reset-limit {limit} is reached")
        elif self._new_ones_wait or self._leaving:
            # They came too late for this one.
            self._tell_of_others()

    def _on_failed_join(self, why: str) -> None:
        new = set(self._joining) - set(self.members)
        for number in sorted(new):
            # It must not keep the others from going on.
            self._kill(number, f"could not join ({why})")
        if new:
            # Their ends call it off.
            return
        if self._tries < _MOST_TRIES:
            self._form()
        else:
            self._tell_of_end(f"the ranks cannot join: {why}")

    @property
    def _silent(self) -> list[int]:
        """Those that have places and do not say whether they could take them."""
        answered = (self._joined_next | self._could_not.keys()) & self._waiting.keys()
        return [number for number in self._joining if number not in answered]

    def _on_deadline(self) -> None:
        if self._why_over:
            for number in self._left:
                self._kill(number, f"has not ended for {self._limits.timeout:g} s")
        elif self._joining:
            self._kill_those_that_do_not_join()
        elif self._all_wait:
            self._tell_of_end(f"{self._too_few}, for {self._limits.timeout:g} s")
        else:
            late = f"for {self._limits.timeout:g} s (--elastic-timeout)"
            for number in self._left:
                if number not in self._waiting:
                    self._kill(number, f"has not left the job that failed {late}")

    def _kill_those_that_do_not_join(self) -> None:
        silent = self._silent
        if len(silent) == len(self._joining) and not self._are_late:
            # All wait for one. Those that hear this stop waiting, and say so.
            self._are_late = True
            self._deadline = self._clock() + _GRACE_SECONDS
            for number in silent:
                self._tell(number, "late")
            return
        for number in silent:
            self._kill(number, "does not join the others")

    def _tell_of_others(self) -> None:
        for number in self.members:
            if number in self._here:
                self._tell(number, "others")

    def _tell_of_end(self, why: str) -> None:
        self._why_over = self._why_over or why
        self._deadline = self._clock() + self._limits.timeout
        self._start_no_more("since the job ends")
        for number in self._waiting:
            self._tell(number, "end", why=self._why_over)

    def _tell(self, number: int, word: str, **rest: Any) -> None:
        self._acts.append(Tell(number, word, rest))

    def _say(self, line: str) -> None:
        self._acts.append(Say(line))


def _new(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    are = "ranks {} are" if len(numbers) > 1 else "rank {} is"
    return f"; {are.format(_listed(numbers))} new"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
