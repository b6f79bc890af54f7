"""A job that goes on with the ranks that are left after others have failed.

Its script calls `keras_hvd.elastic.run`. A rank whose job has failed asks here for its
place in the next one, so it does not matter which rank has failed. Ranks that have
failed may be started again: such a new one waits here until those of the job make room
for it, and all get places in another job.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import time
from collections.abc import Sequence
from typing import Any

from keras_hvd.launch import report
from keras_hvd.launch.job import Job, Stage
from keras_hvd.launch.rank import Rank
from keras_hvd.launch.starts import Starts
from keras_hvd.world import renewal
from keras_hvd.world.renewal import Renewal, Words

# The times in a row that all ranks are there and cannot join.
_MOST_TRIES = 3

# Once one rank has found that it cannot join, the others find it within this time.
_GRACE_SECONDS = 5


class ElasticJob(Job):
    """A job that ends once fewer ranks are left than its options want."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        options = self._options
        assert options.least_ranks is not None, "or it is no such job"
        assert options.elastic_timeout is not None, "or it is no such job"
        self._least: int = options.least_ranks
        self._timeout: float = options.elastic_timeout
        self._lost: list[Rank] = []
        # The numbers, as they were started, of those in the job: the first is rank 0.
        self._members = [*range(options.ranks)]
        self._starts = Starts(options.cooldown_range)
        # The connections of ranks that run the function, and those that are in no job.
        self._words: dict[int, Words] = {}
        self._waiting: dict[int, Words] = {}
        # For how many functions, one after another, each has called.
        self._turns: dict[int, int] = dict.fromkeys(self._members, 0)
        self._joining: list[int] = []  # those that have places in the next job
        self._joined_next: set[int] = set()
        self._could_not: set[int] = set()
        self._next = ""  # the job that they are joining
        self._formed = 0
        self._changes = 0
        self._tries = 0
        self._broken_at = 0.0
        self._why_over = ""  # why there is no next job
        self._callers = renewal.listen(self._node_ranks.job)
        self._selector.register(self._callers, selectors.EVENT_READ, self._on_caller)

    # ---- Starts and ends of ranks

    def _environment(self, here: int) -> dict[str, str]:
        told = Renewal(self._node_ranks.job, here, self._starts.are_allowed)
        environment = super()._environment(here)
        if here in self._members:
            return {**environment, **told.variables()}
        # It is alone until it calls the function.
        told = Renewal(told.name, here, told.gains, is_new=True)
        alone = f"{told.name}.{here}.{self._starts.count(here)}"
        environment.pop("KERAS_HVD_REQUIRE_SIZE", None)
        return {**environment, **renewal.place_of(0, 1, alone), **told.variables()}

    def _times(self) -> list[float | None]:
        return [*super()._times(), self._starts.next_time]

    def _forward(self, number: signal.Signals) -> None:
        super()._forward(number)
        if self._interrupted_by is not None:
            self._start_no_more(f"since khvdrun got {self._interrupted_by.name}")

    def _act_at(self, now: float) -> None:
        super()._act_at(now)
        for number in self._starts.due(now):
            self._starts.begin(number)
            try:
                self._start_rank(number, self._starts.count(number))
            except OSError as error:
                self._starts.give_up(number)
                self._say(f"rank {number} {self._what_failed(error)}: {error.strerror}")
                self._form_if_all_wait()

    @property
    def _left(self) -> list[Rank]:
        """The ranks of the job that have not ended, in their order."""
        running = {one.number: one for one in self._ranks if one.status is None}
        return [running[number] for number in self._members if number in running]

    def _on_end(self, ended: Rank, status: int) -> None:
        for of_numbers in (self._words, self._waiting):
            of_numbers.pop(ended.number, None)
        if ended.number not in self._members:
            self._on_end_of_new(ended, status)
        elif self._can_lose(ended, status):
            self._lose(ended, status)
        else:
            self._start_no_more("since the training ends")
            if status != 0 and self._stage == Stage.RUNNING:
                self._end_all(ended)
            super()._on_end(ended, status)
            if self._waiting and self._stage == Stage.RUNNING:
                self._form_if_all_wait()

    def _on_end_of_new(self, ended: Rank, status: int) -> None:
        """It has never been in the job, which goes on as it is."""
        self._forget(ended, status)
        if self._starts.are_allowed:
            self._say(
                f"rank {ended.number} (process {ended.process}) "
                f"{report.describe(ended)} before it had joined: it "
                f"{self._starts.again(ended.number)}"
            )
        if ended.number in self._joining or not self._may_become_enough:
            self._form_if_all_wait()

    def _forget(self, ended: Rank, status: int) -> None:
        ended.status, ended.wake = status, self._wake
        self._ranks.remove(ended)
        # What it has started would be in its successor's way, such as processes that
        # read data.
        with contextlib.suppress(OSError):
            os.killpg(ended.process, signal.SIGTERM)

    def _lose(self, ended: Rank, status: int) -> None:
        self._forget(ended, status)
        self._lost.append(ended)
        self._members.remove(ended.number)
        left = len(self._left)
        again = ""
        if self._starts.are_allowed:
            again = f"; it {self._starts.again(ended.number)}"
        self._say(
            f"rank {ended.number} (process {ended.process}) {report.describe(ended)}; "
            f"{left} {'ranks are' if left > 1 else 'rank is'} left{again}"
        )
        self._note_break()
        self._form_if_all_wait()

    def _can_lose(self, ended: Rank, status: int) -> bool:
        left = len(self._left) - 1
        to_come = self._starts.to_come + 1 if self._starts.are_allowed else 0
        return (
            status != 0
            and self._stage == Stage.RUNNING
            and self._has_joined
            and self._interrupted_by is None
            and not self._why_over
            and left > 0
            and left + to_come >= self._least
            and not self._is_at_limit
        )

    @property
    def _is_at_limit(self) -> bool:
        limit = self._options.reset_limit
        return limit is not None and self._changes >= limit

    @property
    def _may_become_enough(self) -> bool:
        return len(self._left) + self._starts.to_come >= self._least

    def _start_no_more(self, why: str) -> None:
        """Ends the ranks that are not in the job, and starts no other."""
        for number in self._starts.stop():
            self._say(f"rank {number} is not started again, {why}")
        for one in self._ranks:
            if one.number not in self._members:
                self._kill_one(one, f"had not joined, {why}")

    def _kill_one(self, one: Rank, why: str) -> None:
        if one.status is not None or one.was_told:
            return
        one.was_told = True
        self._say(f"rank {one.number} (process {one.process}) {why}: it is killed")
        self._waiting.pop(one.number, None)
        one.signal(signal.SIGKILL)

    def _end_all(self, ended: Rank) -> None:
        """Lets the ranks end as those of any job whose rank has failed."""
        if self._interrupted_by is not None:
            self._tell_of_end(f"khvdrun got {self._interrupted_by.name}")
            return
        # The report looks for the first failure of all.
        self._ranks += self._lost
        self._lost.clear()
        left = len(self._left) - 1
        why = f"--reset-limit {self._options.reset_limit} is reached"
        if left < self._least:
            why = f"{left} are fewer than --min-np {self._least}"
        self._tell_of_end(f"rank {ended.number} has ended, and {why}")

    def _tell_of_end(self, why: str) -> None:
        self._why_over = self._why_over or why
        self._deadline = None
        self._start_no_more("since the job ends")
        for words in self._waiting.values():
            self._tell(words, "end", why=self._why_over)

    def _note_break(self) -> None:
        if self._broken_at == 0:
            self._broken_at = time.monotonic()

    # ---- Words of ranks

    def _on_caller(self) -> None:
        words = renewal.accept(self._callers)
        if words is not None:
            heard = functools.partial(self._on_words, words)
            self._selector.register(words.fileno(), selectors.EVENT_READ, heard)

    def _on_words(self, words: Words) -> None:
        try:
            for told in words.heard():
                self._on_message(words, told)
        except OSError:
            # The rank has ended, or its function has; or it is none.
            self._selector.unregister(words.fileno())
            words.close()
            for of_numbers in (self._words, self._waiting):
                for number in [n for n, each in of_numbers.items() if each is words]:
                    del of_numbers[number]

    def _on_message(self, words: Words, told: dict[str, Any]) -> None:
        if told["word"] == "here":
            number = told.get("number", -1)
            if all(one.number != number for one in self._ranks):
                # It has ended since it said so.
                return
            self._words[number] = words
            self._turns[number] = told.get("turn", 0)
            self._refuse_late_ones()
            if number in self._members and self._new_ones_wait:
                self._tell(words, "others")
            return
        number = next((n for n, each in self._words.items() if each is words), None)
        if number is None:
            # It has ended since it said so.
            return
        if told["word"] == "waits":
            self._on_waiting(number, words)
        elif told.get("job") != self._next:
            # Of a job that was called off.
            return
        elif told["word"] == "joined":
            self._joined_next.add(number)
            self._go_if_all_joined()
        else:
            self._could_not.add(number)
            self._on_failed_join(str(told.get("why")))

    def _on_failed_join(self, why: str) -> None:
        if self._silent:
            soon = time.monotonic() + _GRACE_SECONDS
            self._deadline = min(self._deadline or soon, soon)
            return
        if not self._all_wait:
            # One has ended, and its end is about to be known.
            return
        new = set(self._joining) - set(self._members)
        for one in self._ranks:
            if one.number in new:
                # It must not keep the others from going on.
                self._kill_one(one, f"could not join ({why})")
        if new:
            self._form_if_all_wait()
        elif self._tries < _MOST_TRIES:
            self._form()
        else:
            self._tell_of_end(f"the ranks cannot join: {why}")

    @property
    def _silent(self) -> list[int]:
        """Those that have places and do not say whether they could take them."""
        answered = self._joined_next | self._could_not
        return [number for number in self._joining if number not in answered]

    def _on_waiting(self, number: int, words: Words) -> None:
        if number not in self._members and not self._starts.are_allowed:
            # It is being killed.
            return
        self._waiting[number] = words
        if self._why_over or self._stage != Stage.RUNNING:
            self._tell(words, "end", why=self._why_over or "it is ending")
            return
        if number not in self._members:
            self._refuse_late_ones()
            if self._broken_at == 0:
                if self._new_ones_wait:
                    self._tell_of_others()
            elif not self._joining:
                self._form_if_all_wait()
            return
        self._note_break()
        if self._deadline is None:
            # Not before: those that are done need no other, and take their time.
            self._deadline = time.monotonic() + self._timeout
        self._form_if_all_wait()

    def _refuse_late_ones(self) -> None:
        """Ends new ranks that call a function which those of the job have left."""
        reached = max(self._turns[number] for number in self._members)
        for number, words in [*self._waiting.items()]:
            if number not in self._members and self._turns[number] < reached:
                del self._waiting[number]
                why = (
                    f"rank {number} calls function {self._turns[number]} of "
                    f"elastic.run, and the others call function {reached}: a rank can "
                    "come only while the first one runs"
                )
                self._tell(words, "end", why=why)

    # ---- The next job

    @property
    def _new_ones_wait(self) -> bool:
        return any(number not in self._members for number in self._waiting)

    @property
    def _all_wait(self) -> bool:
        return all(one.number in self._waiting for one in self._left)

    def _form_if_all_wait(self) -> None:
        left = self._left
        if self._why_over or not left or not self._all_wait:
            return
        if len(self._waiting) >= self._least:
            self._tries = 0
            self._form()
        elif self._may_become_enough:
            self._joining.clear()
            if self._deadline is None:
                self._deadline = time.monotonic() + self._timeout
            self._say(
                f"{_ranks(len(self._waiting))} for others, at most "
                f"{self._timeout:g} s (--elastic-timeout)"
            )
        else:
            self._tell_of_end(self._too_few)

    @property
    def _too_few(self) -> str:
        return f"{len(self._waiting)} are fewer than --min-np {self._least}"

    def _form(self) -> None:
        """Gives places to the ranks of the job, in their order, then to new ones."""
        self._tries += 1
        self._formed += 1
        self._next = f"{self._node_ranks.job}.{self._formed}"
        self._deadline = time.monotonic() + self._timeout
        self._joined_next.clear()
        self._could_not.clear()
        of_job = [one.number for one in self._left]
        new = [number for number in self._waiting if number not in self._members]
        self._joining = [*of_job, *new]
        for place, number in enumerate(self._joining):
            words, size = self._waiting[number], len(self._joining)
            self._tell(words, "join", rank=place, size=size, job=self._next)

    def _go_if_all_joined(self) -> None:
        if not (self._joined_next & set(self._waiting)).issuperset(self._joining):
            return
        self._changes += 1
        self._deadline = None
        # The report of a later end is not about them.
        self._lost.clear()
        for number in self._joining:
            self._tell(self._waiting.pop(number), "go")
        new = [number for number in self._joining if number not in self._members]
        for number in new:
            self._starts.note_joined(number)
        seconds = time.monotonic() - self._broken_at
        self._broken_at = 0.0
        self._say(
            f"the job goes on with {len(self._joining)} of {self._options.ranks} ranks "
            f"after {seconds:.2f} s: those that were started as "
            f"{_listed(self._joining)}{_new(new)}"
        )
        self._members, self._joining = self._joining, []
        if self._is_at_limit:
            limit = self._options.reset_limit
            self._start_no_more(f"since --reset-limit {limit} is reached")
        elif self._new_ones_wait:
            # They came too late for this one.
            self._tell_of_others()

    def _tell_of_others(self) -> None:
        for number in set(self._members) & set(self._words):
            self._tell(self._words[number], "others")

    def _escalate(self) -> None:
        if self._stage != Stage.RUNNING:
            super()._escalate()
            return
        self._deadline = None
        if self._all_wait and not self._joining:
            self._tell_of_end(f"{self._too_few}, for {self._timeout:g} s")
            return
        if self._joining:
            self._kill_those_that_do_not_join()
            return
        late = f"for {self._timeout:g} s (--elastic-timeout)"
        for one in self._left:
            if one.number not in self._waiting:
                self._kill_one(one, f"has not left the job that failed {late}")

    def _kill_those_that_do_not_join(self) -> None:
        silent = self._silent
        if len(silent) == len(self._joining):
            # All wait for one. If it is one of the job, the time for joining tells.
            silent = [number for number in silent if number not in self._members]
        for one in self._ranks:
            if one.number in silent:
                self._kill_one(one, "does not join the others")
        if silent:
            self._form_if_all_wait()

    def _tell(self, words: Words, word: str, **rest: Any) -> None:
        try:
            words.say(word, **rest)
        except OSError:
            # Its end is about to be known.
            return


def _ranks(count: int) -> str:
    return f"{count} {'ranks wait' if count > 1 else 'rank waits'}"


def _new(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    return f"; rank{'s' * (len(numbers) > 1)} {_listed(numbers)} started again"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
