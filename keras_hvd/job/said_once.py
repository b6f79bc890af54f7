"""Hides what all ranks would say: rank 0 shows it for all of them.

That is what Keras prints (summaries, progress bars, what its callbacks say), and
warnings: of Python, and in the logs of TensorFlow and Keras. Errors, and what a script
prints itself, come from every rank.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MOST_KEPT = 20

# What this prints is an error: the loss of a batch of this rank is invalid.
_TELLS_OF_ERROR = "keras.src.callbacks.terminate_on_nan"

# In the texts of errors about another rank's end.
_BLAMES_ANOTHER = "RankFailedError", "AbortedError", "The job cannot go on"

_hides = False

# The last warnings that were hidden, which may explain why this rank fails.
_kept: collections.deque[str] = collections.deque(maxlen=_MOST_KEPT)


class RankWarning(UserWarning):
    """A warning that any rank shows, not only rank 0."""


def begin(rank: int, shows_all: bool) -> None:
    """Hides from now on what rank 0 of this job says too, unless `shows_all`.

    Example:

    >>> begin(rank=1, shows_all=False)
    >>> warnings.warn("of interest once")
    >>> begin(rank=0, shows_all=False)
    """
    global _hides
    _hides = rank != 0 and not shows_all
    _kept.clear()
    if _hides:
        _install()


def show() -> None:
    """Hides nothing more in this job: this rank is the first one of a process set.

    Example:

    >>> show()
    """
    global _hides
    _hides = False


def hides() -> bool:
    """Whether this rank hides what rank 0 says too.

    Example:

    >>> hides()
    False
    """
    return _hides


def tell_hidden(error: str) -> None:
    """Shows the last hidden warnings before an error ends this rank.

    Not if it only blames another rank, whose warnings may explain it.

    Example:

    >>> tell_hidden("ValueError: no number")
    """
    if _kept and not any(each in error for each in _BLAMES_ANOTHER):
        lines = "\n".join(_kept)
        sys.stderr.write(f"Warnings of this rank before its error:\n{lines}\n")
    _kept.clear()


@functools.cache
def _install() -> None:
    plain = warnings.showwarning

    @functools.wraps(plain)
    def showwarning(message, category, filename, lineno, file=None, line=None):
        if not _hides or file is not None or issubclass(category, RankWarning):
            plain(message, category, filename, lineno, file, line)
            return
        text = warnings.formatwarning(message, category, filename, lineno, line)
        _kept.append(text.rstrip())

    # Not a filter: tests and scripts record warnings, or make errors of them.
    warnings.showwarning = showwarning
    _hide_warnings_of("tensorflow")
    for name in sys.modules.keys() & _changes.keys():
        _changes.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Importing)


def _hide_warnings_of(logger: str) -> None:
    logging.getLogger(logger).addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    if not _hides or record.levelno >= logging.ERROR:
        return True
    if record.levelno >= logging.WARNING:
        _kept.append(f"{record.levelname}:{record.name}:{record.getMessage()}")
    return False


def _silence_absl(module: ModuleType) -> None:
    # Not before absl has made its logger, which is of a class of its own.
    _hide_warnings_of("absl")


def _silence_keras(io_utils: Any) -> None:
    # Keras' own switch would not do: each thread has its own, clear_session() resets
    # it, and what it turns off still goes to a log.
    plain, is_interactive = io_utils.print_msg, io_utils.is_interactive_logging_enabled

    @functools.wraps(plain)
    def print_msg(message: Any, line_break: bool = True) -> None:
        if not _hides:
            plain(message, line_break)
        elif sys._getframe(1).f_globals["__name__"] == _TELLS_OF_ERROR:
            print(message, flush=True)

    @functools.wraps(is_interactive)
    def is_interactive_logging_enabled() -> bool:
        # Where it is not, a summary is printed by `print_msg`.
        return not _hides and is_interactive()

    io_utils.print_msg = print_msg
    io_utils.is_interactive_logging_enabled = is_interactive_logging_enabled


# What is changed, when it has been imported.
_changes: dict[str, Callable[[ModuleType], None]] = {
    "absl.logging": _silence_absl,
    "keras.src.utils.io_utils": _silence_keras,
}


class _Importing:
    """Changes modules that a script imports after it has joined the job."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        change = _changes.pop(name, None)
        spec = None if change is None else importlib.util.find_spec(name)
        if change is None or spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
