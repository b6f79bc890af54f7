"""Frees iterators of tf.data in a thread, so that no step waits for their threads.

An iterator's autotuning thread sleeps, at last for a minute, and who frees the iterator
wakes it and waits for its end. TensorFlow (2.21) wakes it before it marks the iterator
as cancelled, so a thread that is quick goes to sleep again. Keras frees iterators after
each epoch and each validation, and in a job all ranks wait for the one that sleeps.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
from typing import Any

from tensorflow.python.data.ops import iterator_ops

_NAME = "keras_hvd frees iterators"

# A loop that makes an iterator for each step must not be faster than who frees them.
_MOST_WAITING = 8

_dropped: queue.SimpleQueue[Any] = queue.SimpleQueue()

# After it nothing is freed any more.
_END = object()

# TensorFlow's thread sleeps for a minute at most.
_LONGEST_SECONDS = 70.0

_thread: threading.Thread


@functools.cache
def install() -> None:
    """Makes a thread free the iterators that nothing refers to any more."""
    iterator_ops.OwnedIterator.__del__ = _hand_over
    _start()
    os.register_at_fork(after_in_child=_start)
    atexit.register(_end)


def _start() -> None:
    global _thread
    _thread = threading.Thread(target=_free, args=(_dropped,), name=_NAME, daemon=True)
    _thread.start()


def _end() -> None:
    # Once the interpreter has ended, a thread within TensorFlow that asks for its lock
    # is ended by an exception, which TensorFlow's code takes for a reason to abort.
    _dropped.put(_END)
    _thread.join(_LONGEST_SECONDS)


# By defaults: when the interpreter ends, the module's names may be gone before.
def _hand_over(
    iterator: Any,
    dropped: queue.SimpleQueue[Any] = _dropped,
    most: int = _MOST_WAITING,
) -> None:
    if dropped.qsize() < most:
        # Nothing else may hold the resource: the last one that lets it go frees it.
        dropped.put(vars(iterator).pop("_iterator_resource", None))


def _free(dropped: queue.SimpleQueue[Any]) -> None:
    while dropped.get() is not _END:
        pass
