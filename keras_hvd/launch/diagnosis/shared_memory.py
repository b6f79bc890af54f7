"""/dev/shm, leftovers of dead programs in it, and other running ranks of keras_hvd.

keras_hvd's own shared memory is a memory file without a name. Other software beside it
uses /dev/shm: Python's multiprocessing (Keras' PyDataset with use_multiprocessing), MPI
and NCCL.
"""

import contextlib
import math
import os
import pwd
import re
import shlex
import tempfile
import time
from pathlib import Path

from keras_hvd.launch.diagnosis.findings import Finding, count, warning
from keras_hvd.launch.diagnosis.limits import amount

_FOLDER = Path("/dev/shm")
# NCCL takes about 10 MiB a rank, data workers more; docker's default is 64 MiB.
_ENOUGH_BYTES = 128 << 20
# Names of the memory that libraries remove when they end normally.
_LEFTOVERS = re.compile(
    r"vader_segment\..*|sm_segment\..*|psm2?_.*|ucx_shm_.*|mpich.*|Intel_MPI.*"
    r"|impi_.*|nccl-.*|torch_.*|sem\.(mp|loky)-.*|loky-.*|cuda\.shm\..*"
)
_SHOWN = 6
_OUR_MEMORY = "/memfd:keras_hvd"


def folder(path: Path = _FOLDER) -> Finding:
    """Writes a page to it, and reads its size and free space.

    Example:

    >>> folder().name
    '/dev/shm'
    """
    name = str(path)
    not_ours = "keras_hvd does not use it, but Python's multiprocessing and NCCL do"
    mount = "docker run --shm-size=1g; Kubernetes: an emptyDir with medium: Memory"
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            os.posix_fallocate(file.fileno(), 0, os.sysconf("SC_PAGESIZE"))
    except OSError as error:
        figure = f"cannot be written: {error.strerror}"
        return warning(name, figure, f"{not_ours}: mount or free it ({mount})")
    stat = os.statvfs(path)
    size, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    figure = f"{amount(free)} free of {amount(size)}, writable"
    if free < _ENOUGH_BYTES:
        return warning(name, figure, f"{not_ours}: enlarge it ({mount})")
    return Finding(name, f"{figure}; keras_hvd needs none of it")


def leftovers(path: Path = _FOLDER) -> Finding:
    """Looks for memory that dead programs of this user left behind."""
    name = "leftovers"
    candidates = {
        entry
        for entry in path.iterdir()
        if _LEFTOVERS.fullmatch(entry.name) and entry.lstat().st_uid == os.getuid()
    }
    dead = sorted(candidates - _in_use(candidates)) if candidates else []
    if not dead:
        return Finding(name, f"none in {path}")
    size = sum(entry.lstat().st_blocks * 512 for entry in dead)
    shown = [shlex.quote(str(entry)) for entry in dead[:_SHOWN]]
    more = f" and {len(dead) - _SHOWN} more" if len(dead) > _SHOWN else ""
    return warning(
        name,
        f"{count(len(dead), 'file')}, {amount(size)}, that no process has open",
        f"if no other container shares {path}: rm {' '.join(shown)}{more}",
    )


def other_ranks() -> Finding:
    """Looks for ranks of other jobs on this machine, which use the same cores."""
    name = "other jobs"
    found: dict[str, list[int]] = {}
    begun: dict[str, float] = {}
    for process in _processes():
        with contextlib.suppress(OSError):
            if _OUR_MEMORY not in (process / "maps").read_text(errors="replace"):
                continue
            status = process.stat()
            user = _name_of(status.st_uid)
            found.setdefault(user, []).append(int(process.name))
            begun[user] = min(begun.get(user, math.inf), status.st_ctime)
    if not found:
        return Finding(name, "no rank of keras_hvd runs")
    since = {
        user: time.strftime("%F %T", time.localtime(at)) for user, at in begun.items()
    }
    whose = [
        f"{count(len(ranks), 'rank')} of {user} since {since[user]}"
        for user, ranks in sorted(found.items())
    ]
    advice = "they slow a further job down"
    own = found.get(_name_of(os.getuid()))
    if own:
        ranks = " ".join(map(str, sorted(own)))
        advice += f"; if your own are of a job that you have given up: kill {ranks}"
    return warning(name, f"keras_hvd runs: {', '.join(whose)}", advice)


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def _in_use(files: set[Path]) -> set[Path]:
    """Returns the files that a visible process has mapped or open."""
    used: set[Path] = set()
    for process in _processes():
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text(errors="replace")
            used |= {file for file in files if str(file) in maps}
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used.add(descriptor.readlink())
    return used & files


def _processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdecimal()]
