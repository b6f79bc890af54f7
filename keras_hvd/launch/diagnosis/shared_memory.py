"""/dev/shm, leftovers of dead programs in it, and other running ranks of keras_hvd.

keras_hvd's own shared memory is a memory file without a name. Other software beside it
uses /dev/shm: Python's multiprocessing (Keras' PyDataset with use_multiprocessing), MPI
and NCCL.
"""

import contextlib
import os
import re
import shlex
import tempfile
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
    found = []
    for process in _processes():
        with contextlib.suppress(OSError):
            if _OUR_MEMORY in (process / "maps").read_text(errors="replace"):
                found.append(int(process.name))
    if not found:
        return Finding(name, "no rank of keras_hvd runs")
    return warning(
        name,
        f"{len(found)} processes are ranks of keras_hvd",
        "they slow a further job down; if you have given them up: kill "
        + " ".join(map(str, sorted(found))),
    )


def _in_use(files: set[Path]) -> set[Path]:
    """Those files that a visible process has mapped or open."""
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
