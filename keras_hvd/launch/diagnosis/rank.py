"""A measuring rank: times copies and collectives, and prints one line of JSON."""

import array
import ctypes
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable

from keras_hvd.exceptions import KerasHvdError
from keras_hvd.job import basics, native
from keras_hvd.job.host_allreduce import MIN, SUM, HostAllreduce, over_ranks
from keras_hvd.job.system_files import lines_of
from keras_hvd.launch.diagnosis import probes
from keras_hvd.world import initialization

_AGREE = "diagnose/agree"
_SECONDS = 0.5
_LEAST_CALLS = 7
_MOST_CALLS = 5000
_LEAST_COPIES = 15
_COPIED_BYTES = 256 << 20


def main() -> None:
    """Measures up to the size given as the only argument, and prints the figures."""
    largest = int(sys.argv[1])
    try:
        initialization.init()
        # Hosts may have more or less memory.
        least = int(over_ranks(_AGREE, largest, MIN))
        print(json.dumps({"rank": basics.rank(), **_measure(least)}))
    except (KerasHvdError, ValueError) as error:
        print(json.dumps({"error": str(error)}))
        sys.exit(1)


def _measure(largest: int) -> dict[str, object]:
    copies = {size: probes.Copy(size) for size in (1 << 20, largest)}
    copy = copies[largest]
    alone = _repeat(copy, copy.seconds) if basics.local_rank() == 0 else None
    _barrier()
    together = {size: _repeat(one, _together(one)) for size, one in copies.items()}
    reduced = {}
    # Reuses the copy's memory, because there may not be enough for another block.
    memory = probes.address(copy.target)
    for size in (4, 1 << 10, 1 << 20, largest):
        reduced[size] = _summary(_reduce(size, memory, copy.target))
    counters = basics.counters()
    return {
        "alone": alone,
        "together": together,
        "allreduce": reduced,
        "sleeps": counters.sleeps,
        "lost_wakes": counters.lost_wakes,
        "shared_bytes": _shared_bytes(),
    }


def _together(copy: probes.Copy) -> Callable[[], float]:
    """A copy by all ranks at once, timed until the last has ended.

    Timed from outside: with more ranks than cores they copy one after the other, and
    each rank's own time does not show that.
    """

    def seconds() -> float:
        _barrier()
        before = time.perf_counter()
        copy.seconds()
        _barrier()
        return time.perf_counter() - before

    return seconds


def _repeat(copy: probes.Copy, seconds: Callable[[], float]) -> float:
    """The median of many copies, after a first one that does not count."""
    seconds()
    times = max(_LEAST_COPIES, _COPIED_BYTES // copy.size)
    return statistics.median(seconds() for _ in range(times))


def _reduce(size: int, memory: int, view: mmap.mmap) -> list[float]:
    """Checks the sum once, finds out how often to repeat, and repeats."""
    allreduce = HostAllreduce(f"diagnose/{size}", memory, size)
    ranks = basics.size()
    given = array.array("f", [basics.rank() + 1]) * (size // 4)
    expected = array.array("f", [ranks * (ranks + 1) / 2]) * (size // 4)
    ctypes.memmove(memory, given.buffer_info()[0], size)
    allreduce.seconds(1)
    if view[:size] != expected.tobytes():
        raise KerasHvdError(f"the sum of {size} bytes over {ranks} ranks is wrong")
    ctypes.memset(memory, 0, size)
    once = _mean_of_ranks(statistics.median(allreduce.seconds(5)))
    calls = int(_SECONDS / once)
    calls = max(_LEAST_CALLS, min(_MOST_CALLS, calls))
    allreduce.seconds(calls // 5)
    return allreduce.seconds(calls)


def _mean_of_ranks(value: float) -> float:
    """A value's mean over ranks, so that all of them make the same number of calls."""
    return over_ranks(_AGREE, value, SUM) / basics.size()


def _summary(seconds: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(seconds),
        "p90": probes.percentile(seconds, 0.9),
        "calls": len(seconds),
    }


def _barrier() -> None:
    request = native.Request(kind=native.BARRIER, name=b"diagnose")
    basics.check(native.engine().khvd_run(ctypes.byref(request)))


def _shared_bytes() -> int:
    """The size of the memory that this job's ranks share; 0 without /proc."""
    for line in lines_of("/proc/self/maps"):
        if "/memfd:keras_hvd" in line:
            first, last = line.split()[0].split("-")
            return int(last, 16) - int(first, 16)
    return 0
