"""Starts the contenders: every job as its own documentation would have it started."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import environments
from measurement import CONTENDERS, Job, cores_of_ranks

from keras_hvd.job import cores

KHVDRUN = (sys.executable, "-m", "keras_hvd.launch")
ENGINE = CONTENDERS.parents[1] / "keras_hvd" / "_native" / "libkeras_hvd.so"
# Slot sizes and kinds of stores, as contenders/probe_allreduce.py knows them.
PROBE_VARIANTS = [
    f"{kind}/{slot << 10}"
    for kind in ("ordinary", "stream_result", "stream_all")
    for slot in (256, 512)
]


def keras_hvd(
    script: str,
    ranks: int,
    *arguments: object,
    launcher: Sequence[object] = (),
    variables: Mapping[str, str] | None = None,
) -> Job:
    """A script of contenders/ under `khvdrun`.

    Args:
        script: its file name.
        ranks: how many.
        arguments: further ones of the script.
        launcher: further options of `khvdrun`.
        variables: environment variables, beside those of this process.

    Returns:
        The job, running.

    Raises:
        ContenderError: it does not start.
    """
    begin = [*KHVDRUN, "-np", ranks, "--bind-to", "cores", *launcher, sys.executable]
    return Job(
        "keras_hvd",
        lambda path: [[*begin, CONTENDERS / script, "--socket", path, *arguments]],
        ranks,
        {"TF_CPP_MIN_LOG_LEVEL": "2", **(variables or {})},
    )


def independent(script: str, copies: int, *arguments: object) -> Job:
    """Copies of a script that know nothing of each other, on the cores of ranks.

    Args:
        script: its file name.
        copies: how many.
        arguments: further ones of the script.

    Returns:
        The job, running.

    Raises:
        ContenderError: a copy does not start.
    """
    return _copies("independent copies", script, [list(arguments)] * copies)


def meeting(script: str, copies: int, *arguments: object) -> Job:
    """The same copies with a socket between any two, to wait for each other.

    Args:
        script: its file name; it takes the sockets as `--meet`.
        copies: how many.
        arguments: further ones of the script.

    Returns:
        The job, running.

    Raises:
        ContenderError: a copy does not start.
    """
    with contextlib.ExitStack() as stack:
        sockets: list[list[int]] = [[] for _ in range(copies)]
        for pair in itertools.combinations(range(copies), 2):
            for copy, end in zip(pair, socket.socketpair()):
                sockets[copy].append(stack.enter_context(end).fileno())
        return _copies(
            "copies that meet",
            script,
            [[*arguments, "--meet", *numbers] for numbers in sockets],
            list(itertools.chain.from_iterable(sockets)),
        )


def _copies(
    name: str, script: str, arguments: list[list[object]], pass_fds: Sequence[int] = ()
) -> Job:
    """One process for each list of arguments, on the cores of its rank."""
    copies = len(arguments)
    return Job(
        name,
        lambda path: [
            [sys.executable, CONTENDERS / script, "--socket", path]
            + ["--cores", cores_of_ranks(copies), "--rank", rank, "--size", copies]
            + of_copy
            for rank, of_copy in enumerate(arguments)
        ],
        copies,
        {"TF_CPP_MIN_LOG_LEVEL": "2", **cores.thread_variables(copies)},
        pass_fds=pass_fds,
    )


def gpu(
    script: str,
    engine: Path,
    cuda: str,
    nccl: str,
    devices: Sequence[int],
    *arguments: object,
    bound_to: str = "",
    variables: Mapping[str, str] | None = None,
) -> Job:
    """A script of contenders/ whose ranks reach GPUs by the engine's C API.

    Args:
        script: its file name.
        engine: the library.
        cuda: the CUDA driver's; "": the system's.
        nccl: NCCL's; "": the system's.
        devices: the number of each rank's GPU.
        arguments: further ones of the script.
        bound_to: the ranks' cores, by default those of `cores_of_ranks`.
        variables: environment variables, beside those of this process.

    Returns:
        The job, running.

    Raises:
        ContenderError: a rank does not start.
    """
    timed_calls = environments.compiled("timed_gpu_calls.c")
    name = f"{Path(script).stem}-{uuid.uuid4().hex}"
    return Job(
        "GPU ranks",
        lambda path: [
            [sys.executable, CONTENDERS / script, "--socket", path]
            + ["--cores", bound_to or cores_of_ranks(len(devices))]
            + ["--timed-calls", timed_calls, "--engine", engine]
            + [f"--cuda={cuda}", f"--nccl={nccl}", "--job", name, "--rank", rank]
            + ["--size", len(devices), "--device", device, *arguments]
            for rank, device in enumerate(devices)
        ],
        len(devices),
        dict(variables or {}),
    )


def add_engine_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the option that the benchmarks of GPUs have."""
    parser.add_argument(
        "--engine", type=_existing, default=str(ENGINE), help="the library to measure"
    )


def _existing(library: str) -> Path:
    if not Path(library).exists():
        raise argparse.ArgumentTypeError(
            f"there is no {library}: make install, or make gpu-engine"
        )
    return Path(library)


def open_mpi(ranks: int, yielding: bool) -> Job:
    """Open MPI's ranks; `yielding`: those that wait give their core to others."""
    programs = environments.openmpi()
    variables = {
        "OMPI_MCA_mpi_yield_when_idle": "1" if yielding else "0",
    }
    if os.geteuid() == 0:
        variables |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
    # The ranks bind themselves, as every contender's do.
    launcher = ["mpirun", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
    return _mpi("Open MPI", programs, launcher, ranks, variables)


def mpich(ranks: int, yielding: bool) -> Job:
    """MPICH's ranks; `yielding`: those that wait give their core to others at once."""
    variables = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"} if yielding else {}
    launcher = ["mpiexec", "-bind-to", "none"]
    return _mpi("MPICH", environments.mpich(), launcher, ranks, variables)


def gloo(ranks: int) -> Job:
    """torch.distributed's ranks, with gloo."""
    python = environments.torch() / "python"
    return Job(
        "gloo",
        lambda path: [
            [python, CONTENDERS / "gloo_allreduce.py", "--socket", path]
            + ["--cores", cores_of_ranks(ranks), "--meeting", f"{path}-of-gloo"]
            + ["--rank", rank, "--size", ranks]
            for rank in range(ranks)
        ],
        ranks,
    )


def peer(name: str, ranks: int, *arguments: object) -> Job:
    """Ranks of another library, which train the same network.

    Args:
        name: as contenders/peer_training.py knows it.
        ranks: how many.
        arguments: further ones of the script.

    Returns:
        The job, running.

    Raises:
        ContenderError: a rank does not start.
        UnavailableError: the library cannot be had.
    """
    python = {
        "ddp": lambda: environments.torch() / "python",
        "jax": lambda: environments.jax() / "python",
        "multi-worker": lambda: sys.executable,  # it is a part of TensorFlow
    }[name]()
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(ranks)
        ]
        ports = [listener.getsockname()[1] for listener in listeners]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return Job(
        name,
        lambda path: [
            [python, CONTENDERS / "peer_training.py", "--socket", path, "--peer", name]
            + ["--cores", cores_of_ranks(ranks), "--rank", rank, "--size", ranks]
            + ["--addresses", *addresses, *arguments]
            for rank in range(ranks)
        ],
        ranks,
        {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            # Otherwise gloo looks the host's name up, which not every container knows.
            "GLOO_SOCKET_IFNAME": "lo",
            **cores.thread_variables(ranks),
        },
    )


def probe(ranks: int) -> Job:
    """The bare probe's ranks."""
    library = environments.compiled("probe.c")
    memory = os.memfd_create("probe")
    try:
        # Two slots of each size for each rank, and their flags. Untouched pages take no
        # memory.
        os.ftruncate(memory, ranks * (4 << 20))
        return Job(
            "probe",
            lambda path: [
                [sys.executable, CONTENDERS / "probe_allreduce.py", "--socket", path]
                + ["--cores", cores_of_ranks(ranks), "--probe", library]
                + ["--memory", memory, "--rank", rank, "--size", ranks]
                for rank in range(ranks)
            ],
            ranks,
            pass_fds=[memory],
        )
    finally:
        os.close(memory)


def _mpi(
    name: str,
    programs: Path,
    launcher: list[str],
    ranks: int,
    variables: dict[str, str],
) -> Job:
    launcher = [programs / launcher[0], *launcher[1:], "-n", ranks, programs / "python"]
    timed_calls = environments.compiled("timed_calls.c")
    return Job(
        name,
        lambda path: [
            [*launcher, CONTENDERS / "mpi_allreduce.py", "--socket", path]
            + ["--cores", cores_of_ranks(ranks), "--timed-calls", timed_calls]
        ],
        ranks,
        variables,
    )
