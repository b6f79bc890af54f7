"""What the machine itself gives: copying memory, and waking a process that sleeps."""

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
_ANSWER_SECONDS = 2


class Copy:
    """Two blocks of private memory, touched where the process ran then.

    Args:
        size: Bytes of each.
    """

    def __init__(self, size: int):
        self.size = size
        self.source = private_memory(size)
        self.target = private_memory(size)
        self._addresses = address(self.target), address(self.source)

    def seconds(self) -> float:
        """Copies one block to the other once and says how long that took."""
        before = time.perf_counter()
        ctypes.memmove(*self._addresses, self.size)
        return time.perf_counter() - before


def private_memory(size: int) -> mmap.mmap:
    """Memory of this process alone, of whole pages, all of them touched.

    Args:
        size: In bytes.

    Returns:
        The memory, zeros.

    Example:

    >>> len(private_memory(5000))
    5000
    """
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset(address(memory), 0, size)
    return memory


def touches(size: int) -> tuple[float, float]:
    """Writes to all of a block of new memory, and then again.

    Args:
        size: In bytes.

    Returns:
        The seconds of the first time, with a page fault for each page, and of the
        second.
    """
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    where = address(memory)
    times = [time.perf_counter()]
    for value in (1, 2):
        ctypes.memset(where, value, size)
        times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1]


def address(memory: mmap.mmap) -> int:
    """Where a block of memory lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def round_trips(cores: Sequence[set[int]], most: int, patience: float) -> list[float]:
    """Has two processes wake each other in turn; each sleeps until it is woken.

    Args:
        cores: Where to put this process meanwhile, and the other one.
        most: How often, if the time suffices.
        patience: For how many seconds at most.

    Returns:
        The seconds of each round trip: two wake-ups. At least one.

    Raises:
        TimeoutError: The other process does not answer.
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
    """A bandwidth, for people.

    Example:

    >>> gigabytes(12.34e9)
    '12.3 GB/s'
    """
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def duration(seconds: float) -> str:
    """A time, for people.

    Example:

    >>> duration(4.123e-6), duration(0.0123)
    ('4.12 us', '12.3 ms')
    """
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of the others does not exceed.

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
    """Starts a process that posts one semaphore whenever the other one was posted."""
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
        # Not one step further in what is a copy of the parent.
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
