"""The limits of this process: memory, open files, threads."""

import os
import resource
from pathlib import Path

from keras_hvd.job import cores
from keras_hvd.launch.diagnosis.findings import Finding, count, failure, warning

# The memory of a rank without model and data: TensorFlow and Keras, imported.
_TENSORFLOW_BYTES = 512 << 20
# The memory of a measuring rank, with the engine's buffers except exchange memory.
_BARE_RANK_BYTES = 48 << 20
_DEFAULT_EXCHANGE_BYTES = 4 << 20
# Control groups version 1 express "no limit" as a number near the largest.
_NO_LIMIT = 1 << 60


def memory(ranks: int) -> Finding:
    """Compares the free memory to the needs of the ranks."""
    name = "memory"
    free = free_memory()
    limit = memory_limit()
    figure = f"{amount(free)} free, " + (
        "no limit" if limit is None else f"limit {amount(limit)} (control group)"
    )
    exchange = int(os.environ.get("KERAS_HVD_EXCHANGE_BYTES") or 0)
    bare = ranks * ((exchange or _DEFAULT_EXCHANGE_BYTES) + _BARE_RANK_BYTES)
    advice = (
        "raise the limit (docker run --memory; Kubernetes: limits.memory), end other "
        "processes, or start fewer ranks"
    )
    if free < bare:
        text = f"{figure}; {count(ranks, 'rank')} need at least {amount(bare)}"
        return failure(name, text, advice)
    needed = ranks * _TENSORFLOW_BYTES
    if free < needed:
        text = f"{figure}; TensorFlow in {count(ranks, 'rank')} takes {amount(needed)}"
        return warning(name, text, advice)
    return Finding(name, figure)


def free_memory() -> int:
    """Bytes that this process can still get within its control groups' limits."""
    return min([_available(), *(_left(group) for group in _limited())])


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        # The memory that is free at once: less than a process can get.
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    fields = dict(line.split()[:2] for line in lines)
    return int(fields["MemAvailable:"]) << 10


def memory_limit() -> int | None:
    """The smallest memory limit of this process' control groups in bytes, if any."""
    return min((limit for _, limit in _limited()), default=None)


def open_files(ranks: int) -> Finding:
    """Compares the limit of open files to the needs of khvdrun and rank 0."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # khvdrun has a pipe and a log file for each stream of each rank. Rank 0 has a
    # connection to every other rank, and the files of Python, TensorFlow and the data.
    needed = max(4 * ranks + 32, ranks + 128)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise_to = (
            f"ulimit -n {needed}"
            if hard == resource.RLIM_INFINITY or hard >= needed
            else f"docker run --ulimit nofile={needed}, or limits.conf: "
            f"the hard limit is {hard}"
        )
        return warning(
            "open files",
            f"limit {limit}; {count(ranks, 'rank')} need about {needed}",
            f"raise it: {raise_to}",
        )
    is_unlimited = limit == resource.RLIM_INFINITY
    return Finding("open files", "no limit" if is_unlimited else f"limit {limit}")


def processes(ranks: int) -> Finding:
    """Compares the control groups' limit of threads to the needs of TensorFlow."""
    name = "threads"
    left = None
    for path in cores.cgroup_files("pids", "pids.max"):
        text = path.read_text().strip()
        if text != "max":
            running = int((path.parent / "pids.current").read_text())
            here = int(text) - running
            left = here if left is None else min(left, here)
    if left is None:
        return Finding(name, "no limit")
    # The inter-op pool and the data pool have one thread for each core.
    needed = ranks * (2 * len(os.sched_getaffinity(0)) + 16)
    figure = f"{left} more may be started (control group)"
    if left < needed:
        return warning(
            *(
                name,
                f"{figure}; TensorFlow in {count(ranks, 'rank')} may want {needed}",
            ),
            "raise the limit (docker run --pids-limit; Kubernetes: podPidsLimit)",
        )
    return Finding(name, figure)


def amount(size: int) -> str:
    """Formats a number of bytes.

    Example:

    >>> amount(3 << 30), amount(64 << 20), amount(5000)
    ('3 GiB', '64 MiB', '4.88 KiB')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1024:.3g} KiB"


def _limited() -> list[tuple[Path, int]]:
    """The control groups with a memory limit, and the limits in bytes."""
    found = []
    for name in ("memory.max", "memory.limit_in_bytes"):
        for path in cores.cgroup_files("memory", name):
            text = path.read_text().strip()
            if text != "max" and int(text) < _NO_LIMIT:
                found.append((path.parent, int(text)))
    return found


def _left(limited: tuple[Path, int]) -> int:
    """Bytes that a group may still take, counting file pages that can be reclaimed."""
    group, limit = limited
    is_unified = (group / "memory.current").exists()
    used = group / ("memory.current" if is_unified else "memory.usage_in_bytes")
    wanted = "inactive_file" if is_unified else "total_inactive_file"
    reclaimable = 0
    for line in (group / "memory.stat").read_text().splitlines():
        field, value = line.split()
        if field == wanted:
            reclaimable = int(value)
    return max(0, limit - int(used.read_text()) + reclaimable)
