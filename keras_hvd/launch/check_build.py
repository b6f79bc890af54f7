"""`khvdrun --check-build`: the parts that are built, and that open on this machine."""

import ctypes
import fcntl
import functools
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from keras_hvd.backends import current
from keras_hvd.exceptions import LibraryError
from keras_hvd.job import gpu_libraries, installed, native, settings
from keras_hvd.version import __version__
from keras_hvd.world import tls

_ROOT = Path(__file__).parents[2]
_MUNGE_SOCKET = "/run/munge/munge.socket.2"
_LAUNCHERS_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
_PATIENCE_SECONDS = 20


def run() -> int:
    """Prints a yes or no for each part, with the reason. Returns 0 if all exist."""
    print(f"keras_hvd {__version__} in {_ROOT / 'keras_hvd'}")
    for folder in installed.other_copies():
        print(f"not used: another copy, in {folder}")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    print("\nneeded:")
    needed = {"engine": _engine, **_frameworks(), "shared memory": _shared_memory}
    is_complete = all([_show(name, look) for name, look in needed.items()])
    print("\noptional:")
    optional = {"TLS": _tls, "MPI": _mpi, "munge": _munge}
    optional |= {"SLURM": _slurm, "CUDA": _cuda, "NCCL": _nccl}
    for name, look in optional.items():
        _show(name, look)
    return 0 if is_complete else 1


def _frameworks() -> dict[str, Callable[[], str]]:
    """Keras, and the parts for the framework that it runs on."""
    keras = {"Keras": functools.partial(installed.describe, "keras")}
    if current.framework_name() == "torch":
        return {"torch": functools.partial(installed.describe, "torch"), **keras}
    return {"TensorFlow": _tensorflow, "TensorFlow ops": _ops, **keras}


def _show(name: str, look: Callable[[], str]) -> bool:
    try:
        answer, reason = "yes", look()
    except (installed.Missing, LibraryError, OSError, ValueError) as error:
        answer, reason = "no", str(error)
    print(f"  {answer:3}  {name:14}  {reason}", flush=True)
    return answer == "yes"


def _engine() -> str:
    engine = native.engine()
    return f"{engine._name}, version {engine.khvd_version().decode()}"


def _tensorflow() -> str:
    installed.require_one_version("tensorflow")
    return installed.describe("tensorflow")


def _ops() -> str:
    # In a separate process, because TensorFlow logs a lot and may abort.
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); "
        "from keras_hvd.job import native; native.ops(); import tensorflow as tf; "
        "print(json.dumps(native.ops_info(tf.__version__)))"
    )
    opened = subprocess.run(
        [sys.executable, "-c", program, _ROOT], capture_output=True, text=True
    )
    if opened.returncode != 0:
        last_words = opened.stderr.strip().splitlines() or ["no reason given"]
        raise installed.Missing(last_words[-1])
    info = json.loads(opened.stdout.splitlines()[-1])
    built_for = f"built for TensorFlow {info['tensorflow']}"
    if info["xla"]:
        return built_for
    return f"{built_for}, which lacks what collectives in jit_compile=True need"


def _shared_memory() -> str:
    """Tries the engine's steps: seals memory, and opens a socket to hand it over."""
    memory = os.memfd_create("khvdrun-check-build", os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(memory, 0, 4096)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        os.close(memory)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0khvdrun-check-build-{uuid.uuid4().hex}")
    return "sealed memfd and abstract unix sockets"


def _tls() -> str:
    return f"{tls.library(settings.ssl_library())}, for --tls"


def _mpi() -> str:
    """Returns mpi4py's MPI. A process that initializes MPI may hang or be aborted."""
    program = (
        "from mpi4py import MPI; level = MPI.Query_thread(); "
        "names = 'SINGLE FUNNELED SERIALIZED MULTIPLE'.split(); "
        "print(next(n for n in names if getattr(MPI, 'THREAD_' + n) == level)); "
        "print(' '.join(MPI.Get_library_version().split(chr(10))[0].split()))"
    )
    level, version = _output([sys.executable, "-c", program])[-2:]
    version = version.rstrip("\0").split(",")[0].replace("Version: ", "")
    return f"{version}, by mpi4py, with thread level {level}"


def _munge() -> str:
    ctypes.CDLL("libmunge.so.2")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(_MUNGE_SOCKET)
        except OSError as error:
            raise installed.Missing(
                f"libmunge.so.2 opens, but munged does not answer at {_MUNGE_SOCKET}: "
                f"{error.strerror}"
            ) from None
    return f"libmunge.so.2, and munged at {_MUNGE_SOCKET}"


def _slurm() -> str:
    path = shutil.which("srun")
    if path is None:
        raise installed.Missing("there is no srun in PATH")
    return f"{_output([path, '--version'])[-1]} ({path})"


def _output(command: list[str]) -> list[str]:
    """The lines that a command prints. Raises Missing, with its last words."""
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            # Not as a rank of a job that a launcher has started.
            env={
                name: value
                for name, value in os.environ.items()
                if not name.startswith(_LAUNCHERS_VARIABLES)
            },
            timeout=_PATIENCE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise installed.Missing(
            f"{command[0]} did not end within {_PATIENCE_SECONDS} s"
        ) from None
    if ended.returncode != 0:
        last_words = ended.stderr.strip().splitlines() or ["no reason given"]
        raise installed.Missing(last_words[-1])
    return ended.stdout.splitlines()


def _cuda() -> str:
    found = gpu_libraries.support()
    if found.devices == 0:
        raise installed.Missing(found.cuda)
    return found.cuda


def _nccl() -> str:
    found = gpu_libraries.support()
    if found.nccl_version == 0:
        raise installed.Missing(found.nccl)
    return found.nccl
