"""Findings of a diagnosis: a figure, a verdict and, if something is wrong, advice."""

import enum
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from keras_hvd.exceptions import KerasHvdError
from keras_hvd.job.installed import Missing

_OBSTACLES = (OSError, ValueError, Missing, KerasHvdError, subprocess.TimeoutExpired)


class Verdict(enum.Enum):
    """The meaning of a finding for a job."""

    OK = "ok"
    WARNING = "warning"  # a job runs, but slower or less safely than it could
    FAILURE = "failure"  # a job does not run


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    name: str
    figure: str
    verdict: Verdict = Verdict.OK
    advice: str = ""  # for the user

    def __str__(self) -> str:
        line = f"  {self.verdict.value:7}  {self.name:17}  {self.figure}"
        return f"{line}\n{'':11}-> {self.advice}" if self.advice else line


def warning(name: str, figure: str, advice: str) -> Finding:
    """A finding that costs speed or safety."""
    return Finding(name, figure, Verdict.WARNING, advice)


def failure(name: str, figure: str, advice: str) -> Finding:
    """A finding that keeps a job from running."""
    return Finding(name, figure, Verdict.FAILURE, advice)


def count(number: int, noun: str) -> str:
    """Formats a number of things.

    Example:

    >>> count(1, "rank"), count(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def find(name: str, look: Callable[[], Finding]) -> Finding:
    """Calls `look`, and turns an error of it into a finding.

    Systems differ: a file that `look` reads may be missing or have another format.

    Example:

    >>> print(find("speed", lambda: Finding("speed", f"{int('fast')} m/s")))
      warning  speed              unknown: invalid literal for int() with base 10: ...
               -> this system does not show it; the rest of the diagnosis holds
    """
    try:
        return look()
    except _OBSTACLES as error:
        advice = "this system does not show it; the rest of the diagnosis holds"
        return warning(name, f"unknown: {error}", advice)
