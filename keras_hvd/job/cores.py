"""The cores that this machine gives to a job, and their division among its ranks."""

import itertools
import math
import os
import socket
from pathlib import Path

from keras_hvd.job.system_files import lines_of

# The threads of TensorFlow's intra-op pools and OpenMP's teams are all busy at once. If
# every rank had a pool as large as the machine, all ranks would be slower.
_THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")

SHARED = "KERAS_HVD_SHARE_CORES"
"""Set for ranks that have to take their share of the cores themselves."""

_CORES = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_TABLE = Path("/proc/self/cgroup")


def available() -> int:
    """Number of cores that this process may use: its affinity, within its CPU quota.

    Example:

    >>> available() <= os.cpu_count()
    True
    """
    return max(1, int(min(len(os.sched_getaffinity(0)), quota())))


def thread_variables(ranks: int) -> dict[str, str]:
    """Environment variables that give each of `ranks` ranks its share of the cores."""
    share = str(max(1, available() // ranks))
    return dict.fromkeys(_THREAD_VARIABLES, share)


def crowded(ranks: int) -> str:
    """Says that there are fewer cores than `ranks`, if there are; "" otherwise.

    Example:

    >>> crowded(1)
    ''
    >>> "take turns" in crowded(available() + 1)
    True
    """
    usable = available()
    if ranks <= usable:
        return ""
    found = "1 core" if usable == 1 else f"{usable} cores"
    return (
        f"{ranks} ranks take turns on the {found} that {socket.gethostname()} gives "
        f"them: with -np {usable} each has one"
    )


def share(ranks: int) -> None:
    """Gives this process, one of `ranks` on its host, its share, unless it has chosen.

    For a rank that mpirun or srun has placed: `khvdrun` knows no other host's cores.
    TensorFlow reads the variables when it makes its threads.
    """
    for name, value in thread_variables(ranks).items():
        os.environ.setdefault(name, value)


def shares(ranks: int) -> list[set[int]]:
    """Divides the cores between `ranks` ranks, neighbours together: a set for each.

    No set is empty. With more ranks than cores each rank gets one core, and some share
    it.

    Example:

    >>> sum(map(len, shares(1))) == len(os.sched_getaffinity(0))
    True
    """
    cores = sorted(os.sched_getaffinity(0), key=place)
    if ranks >= len(cores):
        return [{cores[rank * len(cores) // ranks]} for rank in range(ranks)]
    bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    return [set(cores[first:last]) for first, last in itertools.pairwise(bounds)]


def cgroup_files(controller: str, name: str) -> list[Path]:
    """Existing files of this process' control group and its parents, innermost first.

    `controller` is its name in version 1, such as "memory". In a container the group's
    own path is often hidden, and the container's group is mounted as the root. Without
    /proc nothing is known of any group.
    """
    found = []
    for line in lines_of(_CGROUP_TABLE):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            roots = [_CGROUPS, _CGROUPS / "unified"]
        elif controller in controllers.split(","):
            roots = [_CGROUPS / controller, _CGROUPS / controllers]
        else:
            continue
        group = Path(path.lstrip("/"))
        for root in roots:
            places = (root / group, *(root / parent for parent in group.parents))
            found += [place / name for place in places if (place / name).is_file()]
    return list(dict.fromkeys(found))


def quota() -> float:
    """CPU time that the control groups allow, in cores; infinite without a limit."""
    limits = [path.read_text().split() for path in cgroup_files("cpu", "cpu.max")]
    for path in cgroup_files("cpu", "cpu.cfs_quota_us"):
        period = path.parent / "cpu.cfs_period_us"
        limits.append([path.read_text().strip(), period.read_text()])
    unlimited = ("max", "-1")
    return min(
        (
            int(allowed) / int(period)
            for allowed, period in limits
            if allowed not in unlimited
        ),
        default=math.inf,
    )


def place(core: int) -> tuple[int, int, int]:
    """A core's package, physical core and number; threads of one core sort together."""
    topology = _CORES / f"cpu{core}" / "topology"
    try:
        package = int((topology / "physical_package_id").read_text())
        physical = int((topology / "core_id").read_text())
    except OSError:
        # Some virtual machines show no topology.
        return 0, core, core
    return package, physical, core
