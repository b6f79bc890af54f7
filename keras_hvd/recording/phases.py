"""How long a rank made steps, and what else took its time."""

from __future__ import annotations

import time

STEPS, TRACING, VALIDATION = "steps", "tracing", "validation"
SAVING, CALLBACKS, REST = "saving", "callbacks", "rest"
"""The phases. Tracing is the first step of each `fit`, which compiles."""

PHASES = STEPS, TRACING, VALIDATION, SAVING, CALLBACKS, REST


class Phases:
    """The time of a rank, each moment of which is in one phase.

    Example:

    >>> phases = Phases()
    >>> phases.enter(STEPS), phases.enter(SAVING), phases.now
    ('rest', 'steps', 'saving')
    >>> phases.seconds()[PHASES.index(VALIDATION)]
    0.0
    """

    def __init__(self) -> None:
        self.now = REST
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.monotonic()

    def enter(self, phase: str) -> str:
        """Begins a phase, and returns the one that it ends."""
        now = time.monotonic()
        self._seconds[self.now] += now - self._since
        self._since = now
        before, self.now = self.now, phase
        return before

    def seconds(self) -> list[float]:
        """The time so far in each of `PHASES`."""
        self.enter(self.now)
        return [*self._seconds.values()]
