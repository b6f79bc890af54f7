"""The cores of this machine: their number for a job, places, and other users."""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from keras_hvd.job import cores
from keras_hvd.job.system_files import lines_of
from keras_hvd.launch.diagnosis import probes
from keras_hvd.launch.diagnosis.findings import Finding, warning

_NODES = Path("/sys/devices/system/node")
_TIMES = Path("/proc/stat")
# How long to watch the activity of other processes.
_WATCH_SECONDS = 0.4
# If others use more than this share of the cores, every figure changes.
_DISTURBING_SHARE = 0.15
_NODE_PROBE_BYTES = 64 << 20
_SHOWN_RANKS = 8


def available(ranks: int) -> Finding:
    """Counts the cores that the affinity and the control group's quota leave."""
    name = "cores"
    usable = len(os.sched_getaffinity(0))
    quota = cores.quota()
    figure = f"{usable} of this machine's {os.cpu_count()}"
    if quota < ranks and quota < usable:
        figure += f", and the time of {quota:.3g} of them (CPU quota)"
        return warning(
            *(name, figure),
            f"the control group stops {ranks} ranks when their time is used up: raise "
            f"the quota (docker run --cpus={ranks}; Kubernetes: limits.cpu) or start "
            f"{max(1, int(quota))} with -np",
        )
    figure += ", no CPU quota" if quota == float("inf") else f", quota {quota:.3g}"
    if usable < ranks:
        return warning(
            *(name, figure),
            f"{ranks} ranks take turns: start {usable} with -np, or lend more cores "
            "(taskset, docker run --cpuset-cpus)",
        )
    return Finding(name, figure)


def threads(ranks: int) -> Finding:
    """Checks whether bound ranks would share physical cores."""
    name = "physical cores"
    usable = os.sched_getaffinity(0)
    physical = {cores.place(core)[:2] for core in usable}
    figure = f"{len(physical)}, each of one thread"
    if len(physical) < len(usable):
        figure = f"{len(physical)}, of {len(usable)} threads (SMT)"
    shares = cores.shares(min(ranks, len(usable)))
    used = [{cores.place(core)[:2] for core in share} for share in shares]
    if sum(map(len, used)) > len(set().union(*used)):
        return warning(
            *(name, figure),
            f"some of {ranks} ranks get two threads of one core, which are slower than "
            f"two cores: -np {len(physical)} gives each a core of its own",
        )
    return Finding(name, figure)


def binding(ranks: int, bind_to: str) -> Finding:
    """Tries `--bind-to cores`, and shows each rank's cores."""
    name = "binding"
    shares = cores.shares(ranks)
    before = os.sched_getaffinity(0)
    try:
        for share in shares:
            os.sched_setaffinity(0, share)
    except OSError as error:
        return warning(
            *(name, f"refused: {error.strerror}"),
            "the container forbids sched_setaffinity: leave --bind-to at none, and "
            "let whoever starts the container bind it (docker run --cpuset-cpus)",
        )
    finally:
        os.sched_setaffinity(0, before)
    parts = [
        f"rank {rank} {'core' if len(share) == 1 else 'cores'} {_ranges(share)}"
        for rank, share in enumerate(shares)
    ]
    shown = ", ".join(parts[:_SHOWN_RANKS])
    shown += ", ..." if len(parts) > _SHOWN_RANKS else ""
    if bind_to == "cores":
        return Finding(name, f"--bind-to cores: {shown}")
    return Finding(name, f"none; --bind-to cores would give {shown}")


def memory_nodes(bind_to: str) -> Finding:
    """Counts the memory nodes (NUMA) of the usable cores, and measures between two."""
    name = "memory nodes"
    usable = os.sched_getaffinity(0)
    groups = [
        here
        for path in sorted(_NODES.glob("node[0-9]*/cpulist"))
        if (here := parse_ranges(path.read_text()) & usable)
    ]
    if len(groups) < 2:
        return Finding(name, "1: all memory is equally near")
    near, far = bandwidth_between(min(groups[0]), min(groups[1]))
    figure = (
        f"{len(groups)}; copies from its own {probes.gigabytes(near)}, from the next "
        f"one's {probes.gigabytes(far)}"
    )
    if bind_to == "cores":
        return Finding(name, figure)
    return warning(
        name, figure, "--bind-to cores keeps each rank beside the memory it has touched"
    )


def bandwidth_between(core: int, other: int) -> tuple[float, float]:
    """Bytes per second that `core` copies from its own memory and from `other`'s.

    Memory belongs to the node of the core that touches it first.
    """
    with _bound_to(core):
        near = probes.Copy(_NODE_PROBE_BYTES)
    with _bound_to(other):
        far = probes.Copy(_NODE_PROBE_BYTES)
    with _bound_to(core):
        pairs = [(near.seconds(), far.seconds()) for _ in range(7)]
    return tuple(
        _NODE_PROBE_BYTES / statistics.median(seconds) for seconds in zip(*pairs)
    )


def other_load() -> Finding:
    """Measures briefly how much other processes and virtual machines use the cores."""
    before = _core_times()
    time.sleep(_WATCH_SECONDS)
    after = _core_times()
    passed = [now - then for then, now in zip(before, after)]
    total, idle, stolen = passed
    count = len(os.sched_getaffinity(0))
    busy = count * (1 - idle / total) if total else 0.0
    lost = count * stolen / total if total else 0.0
    figure = f"{busy:.1f} of {count} cores busy before the measurement"
    if lost > _DISTURBING_SHARE * count:
        return warning(
            "other load",
            f"{figure}, {lost:.1f} of it taken by the host of this virtual machine",
            "the host is overcommitted: all figures below change with its other guests",
        )
    if busy > _DISTURBING_SHARE * count:
        return warning(
            *("other load", figure),
            "end the other processes (top shows them) and diagnose again: the figures "
            "below are those of a busy machine",
        )
    return Finding("other load", figure)


def times_throttled() -> int:
    """How often the CPU quota has stopped this process' control group."""
    for path in cores.cgroup_files("cpu", "cpu.stat"):
        fields = dict(line.split() for line in path.read_text().splitlines())
        if "nr_throttled" in fields:
            return int(fields["nr_throttled"])
    return 0


def parse_ranges(text: str) -> set[int]:
    """Parses the kernel's notation for sets of cores.

    Example:

    >>> sorted(parse_ranges("0-2,8"))
    [0, 1, 2, 8]
    """
    numbers = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _ranges(numbers: Sequence[int] | set[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(
        f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts
    )


def _core_times() -> tuple[int, int, int]:
    """Ticks of the usable cores since boot: total, idle and stolen."""
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    total = idle = stolen = 0
    for line in lines_of(_TIMES):
        name, *fields = line.split()
        if name not in names:
            continue
        # user nice system idle iowait irq softirq steal; guest is part of user
        ticks = [int(field) for field in fields[:8]]
        total += sum(ticks)
        idle += ticks[3] + ticks[4]
        stolen += ticks[7]
    return total, idle, stolen


@contextmanager
def _bound_to(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
