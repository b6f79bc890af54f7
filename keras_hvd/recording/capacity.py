"""Measures the speed of allreduces with nothing beside them, to compare a job's."""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Iterator

from keras_hvd.job.host_allreduce import MAX, HostAllreduce, over_ranks

# Optimizers send gradients in buckets of about this size.
_LARGEST = 4 << 20
_SMALLEST = 64 << 10
_GROWTH = 4
# Like gradients, the numbers come out of the memory and not out of a cache.
_PLACES = 4
_SECONDS = 0.3
_MOST_CALLS = 40


def measure() -> float:
    """Measures the bytes of a tensor that pass in a second; all ranks call it at once.

    It takes up to about a third of a second, in which slow links carry smaller tensors.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> measure() > 0
    True
    """
    memory = ctypes.create_string_buffer(_PLACES * _LARGEST)
    # Without page faults.
    ctypes.memset(memory, 0, len(memory))
    size, began = _SMALLEST, time.perf_counter()
    while True:
        allreduces = _allreduces(ctypes.addressof(memory), size)
        # It also waits for ranks that are late.
        next(allreduces)
        times = [*itertools.islice(allreduces, 2)]
        seconds = _of_slowest(min(times))
        left = _SECONDS - _of_slowest(time.perf_counter() - began)
        if size == _LARGEST or left < 2 * _GROWTH * seconds:
            break
        size *= _GROWTH
    calls = max(0, min(_MOST_CALLS, int(left / seconds)))
    times += itertools.islice(allreduces, calls)
    return size / statistics.median_high(times)


def _allreduces(memory: int, size: int) -> Iterator[float]:
    """Reduces one place after the other, and yields the seconds of each."""
    places = [
        HostAllreduce(f"keras_hvd/report/{size}", memory + number * _LARGEST, size)
        for number in range(_PLACES)
    ]
    for place in itertools.cycle(places):
        yield from place.seconds(1)


def _of_slowest(seconds: float) -> float:
    """The longest time of all ranks, so that all make the same number of calls."""
    return over_ranks("keras_hvd/report/agree", seconds, MAX)
