"""Probes of the machine itself: copying memory and waking a sleeping process."""

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Sequence

from keras_hvd.launch import processes

_libc = ctypes.CDLL(None, use_errno=True)
# The C library's process-shared semaphores are futexes, and no larger than this.
_SEMAPHORE_BYTES = 64
_ANSWER_SECONDS = 30


class Copy:
    """Two blocks of private memory, touched where the process runs now."""

    def __init__(self, size: int):
        self.size = size
        self.source = private_memory(size)
        self.target = private_memory(size)
        self._addresses = address(self.target), address(self.source)

    def seconds(self) -> float:
        """Copies one block to the other and returns the time."""
        before = time.perf_counter()
        ctypes.memmove(*self._addresses, self.size)
        return time.perf_counter() - before


def private_memory(size: int) -> mmap.mmap:
    """Zeroed memory of this process alone, with all of its pages touched.

    Example:

    >>> len(private_memory(5000))
    5000
    """
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset(address(memory), 0, size)
    return memory


def touches(size: int) -> tuple[float, float]:
    """Writes to a new block of memory twice, and returns the seconds of each time.

    The first time has a page fault for each page.
    """
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    where = address(memory)
    times = [time.perf_counter()]
    for value in (1, 2):
        ctypes.memset(where, value, size)
        times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1]


def address(memory: mmap.mmap) -> int:
    """The address of a block of memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def round_trips(cores: Sequence[set[int]], most: int, patience: float) -> list[float]:
    """Makes two processes wake each other in turn; each sleeps until it is woken.

    `cores` has the cores of this process and of the other one. Returns the seconds of
    each round trip (two wake-ups): at least one, at most `most`, within about
    `patience` seconds. Raises TimeoutError if the other process does not answer.
    """
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    here = ctypes.c_void_p(address(memory))
    there = ctypes.c_void_p(address(memory) + _SEMAPHORE_BYTES)
    for semaphore in (here, there):
        _libc.sem_init(semaphore, 1, 0)
    child = _start_answering(there, here, cores[1])
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores[0])
    until = time.monotonic() + patience
    try:
        trips = [_round_trip(there, here)]
        while len(trips) < most and time.monotonic() < until:
            trips.append(_round_trip(there, here))
        return trips
    finally:
        os.sched_setaffinity(0, before)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def gigabytes(bytes_per_second: float) -> str:
    """Formats a bandwidth.

    Example:

    >>> gigabytes(12.34e9)
    '12.3 GB/s'
    """
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def duration(seconds: float) -> str:
    """Formats a time.

    Example:

    >>> duration(4.123e-6), duration(0.0123), duration(1.082)
    ('4.12 us', '12.3 ms', '1.08 s')
    """
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below or at which this share of the values lies.

    Example:

    >>> percentile([5, 1, 2, 3, 4], 0.9)
    5
    """
    return sorted(values)[round(share * (len(values) - 1))]


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _start_answering(
    asked: ctypes.c_void_p, answer: ctypes.c_void_p, cores: set[int]
) -> int:
    """Starts a process that posts one semaphore whenever the other is posted."""
    parent = os.getpid()
    child = os.fork()
    if child != 0:
        return child
    try:
        processes.die_with_parent(parent)
        os.sched_setaffinity(0, cores)
        while True:
            _wait(asked)
            _libc.sem_post(answer)
    finally:
        # The child is a copy of the parent and must not run the parent's code.
        os._exit(1)


def _round_trip(to_other: ctypes.c_void_p, to_us: ctypes.c_void_p) -> float:
    before = time.perf_counter()
    _libc.sem_post(to_other)
    _wait(to_us)
    return time.perf_counter() - before


def _wait(semaphore: ctypes.c_void_p) -> None:
    until = _Timespec(int(time.time()) + _ANSWER_SECONDS, 0)
    if _libc.sem_timedwait(semaphore, ctypes.byref(until)) != 0:
        raise TimeoutError(f"sem_timedwait: {os.strerror(ctypes.get_errno())}")
