"""A job that goes on with the ranks that are left after others have failed.

Its script calls `keras_hvd.elastic.run`. A rank whose job has failed asks here for its
place in the next one, so it does not matter which rank has failed.
"""

from __future__ import annotations

import functools
import selectors
import signal
import time
from collections.abc import Mapping
from typing import Any

from keras_hvd.launch import report
from keras_hvd.launch.job import Job, Stage
from keras_hvd.launch.rank import Rank
from keras_hvd.world import renewal
from keras_hvd.world.renewal import Words

# The times in a row that all ranks are there and cannot join.
_MOST_TRIES = 3


class ElasticJob(Job):
    """A job that ends once fewer ranks are left than its options want."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        assert self._options.least_ranks is not None, "or it is no such job"
        self._least: int = self._options.least_ranks
        self._lost: list[Rank] = []
        # Those that have left their job, by the number with which they were started.
        self._waiting: dict[int, Words] = {}
        self._joined_next: set[int] = set()
        self._next = ""  # the job that they are joining
        self._changes = 0
        self._tries = 0
        self._broken_at = 0.0
        self._callers = renewal.listen(self._node_ranks.job)
        self._selector.register(self._callers, selectors.EVENT_READ, self._on_caller)

    def _environment(self, here: int, given: Mapping[str, str]) -> dict[str, str]:
        variable = renewal.variable(self._node_ranks.job, here)
        return {**super()._environment(here, given), **variable}

    @property
    def _left(self) -> list[Rank]:
        return [one for one in self._ranks if one.status is None]

    def _on_end(self, ended: Rank, status: int) -> None:
        if not self._can_lose(ended, status):
            if status != 0 and self._stage == Stage.RUNNING:
                self._end_all(ended)
            super()._on_end(ended, status)
            if self._waiting and self._stage == Stage.RUNNING:
                self._form_if_all_wait()
            return
        ended.status, ended.wake = status, self._wake
        self._ranks.remove(ended)
        self._lost.append(ended)
        left = len(self._left)
        self._say(
            f"rank {ended.number} (process {ended.process}) {report.describe(ended)}; "
            f"{left} {'ranks are' if left > 1 else 'rank is'} left"
        )
        self._note_break()
        self._form_if_all_wait()

    def _can_lose(self, ended: Rank, status: int) -> bool:
        return (
            status != 0
            and self._stage == Stage.RUNNING
            and self._has_joined
            and self._interrupted_by is None
            and len(self._left) - 1 >= self._least
            and self._changes != self._options.reset_limit
        )

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
        for words in self._waiting.values():
            self._tell(words, "end", why=why)
        self._deadline = None

    def _note_break(self) -> None:
        if self._broken_at == 0:
            self._broken_at = time.monotonic()

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
            # The rank has ended, or goes on in its next job; or it is none.
            self._selector.unregister(words.fileno())
            words.close()
            for number in [n for n, each in self._waiting.items() if each is words]:
                del self._waiting[number]

    def _on_message(self, words: Words, told: dict[str, Any]) -> None:
        if told["word"] == "waits":
            self._waiting[told.get("number", -1)] = words
            if self._stage != Stage.RUNNING:
                self._tell(words, "end", why="it is ending")
                return
            self._note_break()
            if self._deadline is None:
                # Not before: those that are done need no other, and take their time.
                self._deadline = time.monotonic() + self._options.elastic_timeout
            self._form_if_all_wait()
        elif told.get("job") != self._next:
            # Of a job that was called off.
            return
        elif told["word"] == "joined":
            self._joined_next |= {
                number for number, each in self._waiting.items() if each is words
            }
            self._go_if_all_joined()
        elif not self._all_wait:
            # One has ended, and its end is about to be known.
            return
        elif self._tries < _MOST_TRIES:
            self._form()
        else:
            self._tell_of_end(f"the ranks cannot join: {told.get('why')}")

    @property
    def _all_wait(self) -> bool:
        return all(one.number in self._waiting for one in self._left)

    def _form_if_all_wait(self) -> None:
        if self._left and self._all_wait:
            self._tries = 0
            self._form()

    def _form(self) -> None:
        """Gives the ranks that are left, in their order, places in another job."""
        self._changes += self._tries == 0
        self._tries += 1
        self._next = f"{self._node_ranks.job}.{self._changes}.{self._tries}"
        self._joined_next.clear()
        left = self._left
        for place, one in enumerate(left):
            words = self._waiting[one.number]
            self._tell(words, "join", rank=place, size=len(left), job=self._next)

    def _go_if_all_joined(self) -> None:
        left = self._left
        if not all(one.number in self._joined_next for one in left):
            return
        self._deadline = None
        for one in left:
            self._tell(self._waiting.pop(one.number), "go")
        seconds = time.monotonic() - self._broken_at
        self._broken_at = 0.0
        were = ", ".join(str(one.number) for one in left)
        self._say(
            f"the job goes on with {len(left)} of {self._options.ranks} ranks after "
            f"{seconds:.2f} s: those that were started as {were}"
        )

    def _escalate(self) -> None:
        if self._stage != Stage.RUNNING:
            super()._escalate()
            return
        self._deadline = None
        for one in self._left:
            if one.number not in self._waiting:
                self._say(
                    f"rank {one.number} (process {one.process}) has not left the job "
                    f"that failed for {self._options.elastic_timeout:g} s "
                    "(--elastic-timeout), and is killed"
                )
                one.signal(signal.SIGKILL)

    def _tell(self, words: Words, word: str, **rest: Any) -> None:
        try:
            words.say(word, **rest)
        except OSError:
            # Its end is about to be known.
            return
