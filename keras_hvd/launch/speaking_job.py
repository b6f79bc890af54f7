"""A job whose ranks are connected with their `khvdrun`, as `world/renewal.py` says."""

from __future__ import annotations

import contextlib
import functools
import selectors
from typing import Any

from keras_hvd.launch.job import Job
from keras_hvd.world import renewal
from keras_hvd.world.renewal import Words


class SpeakingJob(Job):
    """Hears what its ranks say, and answers."""

    def _listen(self, name: str) -> None:
        """Listens for ranks that were told this name. Raises OSError."""
        # Those that ask where the ranks of the first job meet.
        self._asking: list[Words] = []
        # The connections of ranks that run the function.
        self._words: dict[int, Words] = {}
        self._callers = renewal.listen(name)
        self._selector.register(self._callers, selectors.EVENT_READ, self._on_caller)

    def _on_message(self, words: Words, told: dict[str, Any]) -> None:
        """Acts on what a rank has said."""
        raise NotImplementedError

    def _on_gone(self, number: int) -> None:
        """A rank runs the function no more."""
        raise NotImplementedError

    def _on_caller(self) -> None:
        words = renewal.accept(self._callers)
        if words is not None:
            heard = functools.partial(self._on_words, words)
            self._selector.register(words.fileno(), selectors.EVENT_READ, heard)

    def _on_words(self, words: Words) -> None:
        if words.fileno() < 0:
            # Its end was heard in this round already.
            return
        try:
            for told in words.heard():
                self._on_message(words, told)
        except OSError:
            # The rank has ended, or its function has; or it is none.
            self._selector.unregister(words.fileno())
            words.close()
            number = self._number_of(words)
            if number is not None:
                del self._words[number]
                self._on_gone(number)

    def _hear_what_was_said(self) -> None:
        """Hears what ranks said before one of them ended."""
        for _ in "connections", "words":
            for key, _ in self._selector.select(0):
                if getattr(key.data, "func", key.data) in (
                    self._on_caller,
                    self._on_words,
                ):
                    key.data()

    def _number_of(self, words: Words) -> int | None:
        """The rank at the other end; None if it has ended since it said something."""
        return next((n for n, each in self._words.items() if each is words), None)

    def _tell_where_to_meet(self, place: str) -> None:
        """Answers the ranks of the first job that have asked where rank 0 is."""
        for each in self._asking:
            self._tell(each, "at", at=place)
        self._asking.clear()

    def _tell(self, words: Words | None, word: str, **rest: Any) -> None:
        # Without it, or if it fails, the rank's end is about to be known.
        if words is not None:
            with contextlib.suppress(OSError):
                words.say(word, **rest)
