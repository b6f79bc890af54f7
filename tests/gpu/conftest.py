"""Where the engine and its libraries are, and jobs of ranks that use a GPU.

Nothing here needs TensorFlow: a machine with a GPU, NumPy and pytest is enough.
`KERAS_HVD_CUDA_LIBRARY` and `KERAS_HVD_NCCL_LIBRARY` name other libraries, such as the
stand-ins that tests/launch/test_gpu_stand_ins.py runs these same tests over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))
from keras_hvd.job import (  # noqa: E402
    gpu_libraries,  # noqa: E402
    native,
    settings,
)

RANKS = Path(__file__).parent / "ranks"

# From this version on, and with this variable, several ranks may be on one GPU.
SHARING_NCCL = 23000
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}

# No NCCL: all goes through host memory.
NO_NCCL = "/none/libnccl.so.2"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine",
        type=Path,
        default=CHECKOUT / "keras_hvd" / "_native" / "libkeras_hvd.so",
        help="the engine's library (default: the one in keras_hvd/_native)",
    )
    parser.addoption(
        "--steps",
        type=int,
        default=1000,
        help="random steps of a job (default: 1000)",
    )
    parser.addoption(
        "--random-seed", type=int, default=0, help="of the random steps (default: 0)"
    )


@dataclasses.dataclass(frozen=True)
class Gpus:
    """The GPUs and libraries of this machine.

    Args:
        engine: the engine's library.
        cuda: the CUDA driver's; "": the system's.
        nccl: NCCL's; "": the system's.
        devices: how many GPUs.
        nccl_version: 0: none can be used.
        text: a description of the findings.
    """

    engine: Path
    cuda: str
    nccl: str
    devices: int
    nccl_version: int
    text: str


@pytest.fixture(scope="session")
def gpus(request: pytest.FixtureRequest) -> Gpus:
    """The machine's GPUs; without one the test is skipped."""
    engine = request.config.getoption("--engine")
    if not engine.exists():
        pytest.fail(
            f"there is no {engine}: build it with make install, or make gpu-engine"
        )
    read = settings.read()
    library_of_nccl = read.nccl_library or gpu_libraries.packaged_nccl()
    library = native.open_engine(engine)
    found = native.gpu_support(library, read.cuda_library, library_of_nccl)
    cuda, _, nccl = found.text.decode().partition("\n")
    if found.devices == 0:
        pytest.skip(f"no GPU: {cuda}")
    libraries = map(os.fsdecode, (read.cuda_library, library_of_nccl))
    return Gpus(
        engine, *libraries, found.devices, found.nccl_version, f"{cuda}; {nccl}"
    )


@dataclasses.dataclass(frozen=True)
class Setup:
    """The places of a job's ranks, and the library that moves their tensors.

    Args:
        ranks: how many.
        devices: the number of each one's GPU.
        nccl: NCCL's library.
    """

    ranks: int
    devices: list[int]
    nccl: str


@pytest.fixture(params=["NCCL", "host"])
def path(request: pytest.FixtureRequest) -> str:
    """The way that tensors take: by NCCL, or through host memory."""
    return request.param


@pytest.fixture(
    params=[1, 2, 4, None], ids=["1-rank", "2-ranks", "4-ranks", "each-GPU"]
)
def setup(request: pytest.FixtureRequest, gpus: Gpus, path: str) -> Setup:
    """Every placement that this machine and its NCCL have."""
    on_one = request.param is not None
    ranks = request.param if on_one else gpus.devices
    if not on_one and ranks < 2:
        pytest.skip(f"one GPU: {gpus.text}")
    if path != "NCCL" and ranks == 1:
        pytest.skip("a rank alone goes the same way with NCCL and without")
    if path != "NCCL":
        return Setup(ranks, [0] * ranks if on_one else [*range(ranks)], NO_NCCL)
    if gpus.nccl_version == 0:
        pytest.skip(f"no NCCL: {gpus.text}")
    if on_one and ranks > 1 and gpus.nccl_version < SHARING_NCCL:
        pytest.skip(f"several ranks on a GPU need NCCL 2.30: {gpus.text}")
    return Setup(ranks, [0] * ranks if on_one else [*range(ranks)], gpus.nccl)


class Job:
    """Ranks that run, each in a process of its own."""

    def __init__(self, gpus: Gpus, setup: Setup, folder: Path, **plan: object):
        self._errors = [folder / f"stderr {rank}" for rank in range(setup.ranks)]
        self.processes = []
        name = f"gpu-{uuid.uuid4().hex}"
        for rank, device in enumerate(setup.devices):
            place = {"job": name, "rank": rank, "size": setup.ranks, "device": device}
            libraries = {"cuda": gpus.cuda, "nccl": setup.nccl}
            text = json.dumps(
                {"engine": str(gpus.engine), **libraries, **place, **plan}
            )
            with open(self._errors[rank], "wb") as errors:
                process = subprocess.Popen(
                    [sys.executable, RANKS / "rank.py", text],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={**os.environ, **SHARING},
                )
            self.processes.append(process)

    def errors(self, rank: int) -> str:
        """The standard error of a rank."""
        return self._errors[rank].read_text(errors="replace")

    def line(self, rank: int, seconds: float = 60) -> dict:
        """The next line of a rank."""
        stream = self.processes[rank].stdout
        if not select.select([stream], [], [], seconds)[0]:
            pytest.fail(
                f"rank {rank} says nothing for {seconds} s: {self.errors(rank)}"
            )
        line = stream.readline()
        if not line:
            pytest.fail(f"rank {rank} ended: {self.errors(rank)}")
        return json.loads(line)

    def end(self, seconds: float) -> list[list[dict]]:
        """Waits for all ranks to end well; returns the lines of each."""
        deadline = time.monotonic() + seconds
        said = []
        for rank, process in enumerate(self.processes):
            try:
                out, _ = process.communicate(timeout=deadline - time.monotonic())
            except subprocess.TimeoutExpired:
                pytest.fail(f"rank {rank} did not end: {self.errors(rank)}")
            said.append([json.loads(line) for line in out.splitlines()])
        codes = [process.returncode for process in self.processes]
        texts = [f"rank {rank}: {self.errors(rank)}" for rank in range(len(codes))]
        assert not any(codes), "\n".join([f"exit codes {codes}", *texts])
        return said

    def kill(self) -> None:
        """Kills the ranks that still run."""
        for process in self.processes:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                process.stdout.close()


@pytest.fixture
def start(gpus: Gpus, setup: Setup, tmp_path: Path) -> Iterator:
    """Starts the ranks of a job with a plan; the test ends with none of them left."""
    jobs = []

    def start(**plan: object) -> Job:
        jobs.append(Job(gpus, setup, tmp_path, **plan))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
