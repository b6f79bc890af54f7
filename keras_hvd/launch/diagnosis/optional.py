"""MPI, NCCL and GPUs: not needed, but users want to know whether they work."""

import re
import shutil
import subprocess
import sys

from keras_hvd.job import gpu_libraries, installed
from keras_hvd.launch import other_launchers
from keras_hvd.launch.diagnosis.findings import Finding, warning

_PATIENCE_SECONDS = 10
_FAMILIES = ("Open MPI", "MPICH", "Intel")


def mpi() -> Finding:
    """Looks for mpirun and mpi4py, and checks that they belong to the same MPI."""
    name = "MPI"
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    launcher = f"{path}: {other_launchers.version(path)}" if path else "no mpirun"
    library, error = _mpi4py_library()
    if library is None and error is None:
        return Finding(name, f"{launcher}; no mpi4py (neither is needed)")
    if library is None:
        return warning(
            *(name, f"{launcher}; mpi4py cannot be imported: {error}"),
            "keras_hvd does not need it; if your script does: apt-get install "
            "libopenmpi-dev, or pip install mpich",
        )
    figure = f"{launcher}; mpi4py uses {library}"
    if path and _family(launcher) != _family(library):
        return warning(
            *(name, figure),
            "under this mpirun every process of mpi4py would be alone: put the mpirun "
            f"of {_family(library)} first in PATH, or use khvdrun",
        )
    return Finding(name, figure)


def gpus() -> Finding:
    """Asks the driver for the GPUs, as the engine does."""
    name = "GPUs"
    found = gpu_libraries.support()
    if found.devices > 0:
        return Finding(name, found.cuda)
    if not gpu_libraries.driver_is_loaded():
        return Finding(name, f"none: {found.cuda}")
    return warning(
        *(name, found.cuda),
        "an NVIDIA driver is loaded: nvidia-smi may say more; in a container: "
        "docker run --gpus all",
    )


def nccl() -> Finding:
    """Looks for the NCCL that the engine would use."""
    name = "NCCL"
    found = gpu_libraries.support()
    if found.nccl_version > 0 or found.devices == 0:
        return Finding(name, found.nccl)
    return warning(
        *(name, found.nccl),
        "without it tensors on GPUs go through host memory, which is slow: "
        "pip install nvidia-nccl-cu12, or nvidia-nccl-cu13 for CUDA 13",
    )


def _mpi4py_library() -> tuple[str | None, str | None]:
    """The library that mpi4py has loaded, and the error if it could not."""
    try:
        installed.versions("mpi4py")
    except installed.Missing:
        return None, None
    # In a separate process, because a broken library may abort it.
    program = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "print(MPI.Get_library_version())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=_PATIENCE_SECONDS,
    )
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines() or [f"code {ended.returncode}"]
        return None, lines[-1]
    return describe_library(ended.stdout), None


def describe_library(text: str) -> str:
    r"""Name and version of an MPI from `MPI_Get_library_version`, else the first line.

    Example:

    >>> describe_library("MPICH Version:      4.3.2\nMPICH Release date: ...")
    'MPICH 4.3.2'
    >>> describe_library("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4")
    'Open MPI 4.1.4'
    """
    found = re.search(r"(Open MPI|MPICH)(?: Version:)?\s+v?(\d[\w.]*)", text)
    if found:
        return f"{found[1]} {found[2]}"
    return next(iter(text.strip().splitlines()), "an unnamed library")


def _family(description: str) -> str:
    named = [family for family in _FAMILIES if family in description]
    return named[0] if named else description
