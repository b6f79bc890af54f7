"""Unnamed eager collectives, which have one name and one thread for each kind.

Two threads may call them in different orders on different ranks, which the tensors
would not show. So a second thread may take over only if the program fixes the order:
the thread was started afterwards, or it is the main thread and the other has ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from keras_hvd.exceptions import MismatchError

_Key = tuple[int, str]  # a process set and a name


def require_name(kind: str, name: Any) -> None:
    """Raises TypeError for a non-string, ValueError for an empty name or a zero byte.

    Example:

    >>> require_name("allreduce", "")
    Traceback (most recent call last):
    ValueError: allreduce: name must not be empty; leave it out instead
    """
    if not isinstance(name, str):
        raise TypeError(f"{kind}: name must be a string, got {name!r}")
    if not name:
        raise ValueError(f"{kind}: name must not be empty; leave it out instead")
    if "\0" in name:
        # The engine would end the name there, and match another tensor's.
        raise ValueError(f"{kind}: name must not have a zero byte, got {name!r}")


class Turns:
    """Tracks which thread called a name's collectives last, and which others existed.

    Example:

    >>> turns = Turns()
    >>> with turns.take("unnamed_barrier"):
    ...     pass
    >>> def other_thread():
    ...     with turns.take("unnamed_barrier"):
    ...         print("started afterwards")
    >>> thread = threading.Thread(target=other_thread)
    >>> thread.start(); thread.join()
    started afterwards
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The lock guards all attributes below.
        self._running: dict[_Key, threading.Thread] = {}
        self._last: dict[_Key, threading.Thread] = {}
        self._there: dict[_Key, frozenset[threading.Thread]] = {}

    @contextlib.contextmanager
    def take(self, name: str, process_set: int = 0) -> Iterator[None]:
        """A context in which this thread runs a collective.

        Raises MismatchError if another thread may run one of that name on another rank.
        """
        this = threading.current_thread()
        key = process_set, name
        with self._lock:
            other = self._running.get(key) or self._last.get(key, this)
            if other is not this and not self._follows(this, other, key):
                raise MismatchError(
                    f"{name!r}: thread {this.name!r} calls it eagerly without a "
                    f"name, as thread {other.name!r} does. The ranks may run them in "
                    "different orders and mix their tensors: give each of the two a "
                    "name, or call both from one thread"
                )
            self._running[key] = self._last[key] = this
        try:
            yield
        finally:
            with self._lock:
                del self._running[key]
                self._there[key] = frozenset(threading.enumerate())

    @contextlib.contextmanager
    def name(self, kind: str, name: str | None, process_set: int = 0) -> Iterator[str]:
        """A context with the name of a collective, in which it runs.

        Without a name, two threads may not call it at once, as in `take`. Raises
        TypeError or ValueError if it cannot be a name.

        >>> with Turns().name("barrier", None) as name:
        ...     print(name)
        unnamed_barrier
        """
        if name is not None:
            require_name(kind, name)
            yield name
            return
        name = f"unnamed_{kind}"
        with self.take(name, process_set):
            yield name

    def _follows(
        self, this: threading.Thread, other: threading.Thread, key: _Key
    ) -> bool:
        """Whether `this` comes after `other` on every rank."""
        if key in self._running:
            return False
        if this not in self._there[key]:
            return True
        if this is threading.main_thread() and not other.is_alive():
            return True
        # TensorFlow's own threads, in a tf.py_function, have the order of its graph.
        return any(isinstance(each, threading._DummyThread) for each in (this, other))
