"""Hides what all ranks would say: rank 0 shows it for all of them.

That is what Keras prints (summaries, progress bars, what its callbacks say), and
warnings: of Python, and of TensorFlow and Keras in their logs. Errors, and what a
script prints and logs itself, come from every rank.
"""

from __future__ import annotations

import collections
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from keras_hvd.job import basics, log

_MOST_KEPT = 20

# What this prints is an error: the loss of a batch of this rank is invalid.
_TELLS_OF_ERROR = "keras.src.callbacks.terminate_on_nan"

# In the texts of errors about another rank's end.
_BLAMES_ANOTHER = "RankFailedError", "AbortedError", "The job cannot go on"

_FRAMEWORKS = "tensorflow", "keras", "absl"

_hides = False

# The process sets without rank 0 whose first rank this is.
_speaks_for: set[int] = set()

# The last warnings that were hidden, which may explain why this rank fails.
_kept: collections.deque[str] = collections.deque(maxlen=_MOST_KEPT)


def begin(rank: int, shows_all: bool) -> None:
    """Hides from now on what rank 0 of this job says too, unless `shows_all`.

    Example:

    >>> begin(rank=1, shows_all=False)
    >>> warnings.warn("of interest once")
    >>> begin(rank=0, shows_all=False)
    """
    global _hides
    _hides = rank != 0 and not shows_all
    _speaks_for.clear()
    _kept.clear()
    if _hides:
        _hide_warnings_of_python()
        _install()


def speak_for(process_set: int, ranks: Sequence[int]) -> None:
    """Hides nothing on the first rank of a process set without rank 0.

    Not for a set of one rank, which repeats what the others' sets say.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> speak_for(1, [0, 1])
    """
    if ranks[0] == basics.rank() != 0 and len(ranks) > 1:
        _speaks_for.add(process_set)


def fall_silent(process_set: int) -> None:
    """Ends `speak_for`.

    Example:

    >>> fall_silent(1)
    """
    _speaks_for.discard(process_set)


def hides() -> bool:
    """Whether this rank, in a job, hides what rank 0 says too.

    Example:

    >>> hides()
    False
    """
    return _hides and not _speaks_for and basics.is_initialized()


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


def _hide_warnings_of_python() -> None:
    plain = warnings.showwarning
    # Another one is there after a `catch_warnings` in which the last job began.
    if getattr(plain, "hides", False):
        return

    @functools.wraps(plain)
    def showwarning(message, category, filename, lineno, file=None, line=None):
        if not hides() or file is not None or issubclass(category, log.RankWarning):
            plain(message, category, filename, lineno, file, line)
            return
        text = warnings.formatwarning(message, category, filename, lineno, line)
        _kept.append(text.rstrip())

    # Not a filter: tests and scripts record warnings, or make errors of them.
    showwarning.hides = True  # type: ignore[attr-defined]
    warnings.showwarning = showwarning


@functools.cache
def _install() -> None:
    _hide_warnings_of("tensorflow")
    for name in sys.modules.keys() & _changes.keys():
        _changes.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Importing)


def _hide_warnings_of(logger: str) -> None:
    logging.getLogger(logger).addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    if not hides() or record.levelno != logging.WARNING:
        return True
    # A script may write to their logs too, and may lie in a folder of such a name.
    folders = (getattr(sys.modules.get(name), "__path__", ()) for name in _FRAMEWORKS)
    if not record.pathname.startswith(
        tuple(f"{one}/" for each in folders for one in each)
    ):
        return True
    _kept.append(f"{record.levelname}:{record.name}:{record.getMessage()}")
    return False


def _silence_keras(io_utils: Any) -> None:
    # Keras' own switch would not do: each thread has its own, clear_session() resets
    # it, and what it turns off still goes to a log.
    plain, is_interactive = io_utils.print_msg, io_utils.is_interactive_logging_enabled

    @functools.wraps(plain)
    def print_msg(message: Any, line_break: bool = True) -> None:
        if not hides():
            plain(message, line_break)
        elif sys._getframe(1).f_globals["__name__"] == _TELLS_OF_ERROR:
            print(message, flush=True)

    @functools.wraps(is_interactive)
    def is_interactive_logging_enabled() -> bool:
        # Where it is not, a summary is printed by `print_msg`.
        return not hides() and is_interactive()

    io_utils.print_msg = print_msg
    io_utils.is_interactive_logging_enabled = is_interactive_logging_enabled


# What is changed, when it has been imported.
_changes: dict[str, Callable[[ModuleType], None]] = {
    # Not before absl has made its logger, which is of a class of its own.
    "absl.logging": lambda _: _hide_warnings_of("absl"),
    "keras.src.utils.io_utils": _silence_keras,
}


class _Importing:
    """Changes modules that a script imports after it has joined the job."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _changes:
            return None
        for finder in sys.meta_path:
            if finder is not _Importing:
                spec = finder.find_spec(name, path, target)
                if spec is not None and spec.loader is not None:
                    spec.loader = _Changing(spec.loader)  # type: ignore[assignment]
                    return spec
        return None


class _Changing:
    """A loader that changes the module that another one loads."""

    def __init__(self, loader: Any):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if spec.name in _changes:
            _changes.pop(spec.name)(module)
