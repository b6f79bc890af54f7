"""The same script under mpirun of Open MPI and MPICH, srun, and nothing.

A launcher that is not installed, or a Slurm that does not answer, skips its tests.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHOW_WORLD = (
    sys.executable,
    "-c",
    "import dataclasses, keras_hvd.environment as e\n"
    "print(dataclasses.asdict(e.world()), flush=True)",
)


def version(command: str) -> str:
    if shutil.which(command) is None:
        return ""
    shown = subprocess.run([command, "--version"], capture_output=True, text=True)
    return shown.stdout + shown.stderr


def first_of(kind: str, *commands: str) -> str | None:
    """The first command that is there and of a kind, by its version's text."""
    return next((one for one in commands if kind in version(one)), None)


def slurm_answers() -> bool:
    if shutil.which("srun") is None:
        return False
    try:
        idle = subprocess.run(
            ["sinfo", "--noheader", "--states=idle"], capture_output=True, timeout=10
        )
    except subprocess.TimeoutExpired:
        return False
    return idle.returncode == 0 and idle.stdout != b""


OPEN_MPI = first_of("Open MPI", "mpirun", "mpirun.openmpi")
# The mpich package of PyPI puts its mpiexec beside this Python.
MPICH = first_of(
    "HYDRA",
    os.path.join(os.path.dirname(sys.executable), "mpiexec"),
    "mpiexec.hydra",
    "mpiexec.mpich",
    "mpiexec",
)
SLURM = slurm_answers()


def open_mpi(size: int) -> list[str]:
    if OPEN_MPI is None:
        pytest.skip("Open MPI's mpirun is not installed")
    return [OPEN_MPI, "--allow-run-as-root", "--oversubscribe", "-np", str(size)]


def mpich(size: int) -> list[str]:
    if MPICH is None:
        pytest.skip("MPICH's mpiexec is not installed")
    return [MPICH, "-np", str(size)]


def srun(size: int) -> list[str]:
    if not SLURM:
        pytest.skip("no Slurm answers here")
    return ["srun", "--overcommit", "-n", str(size)]


def worlds(command: list[str]) -> list[dict]:
    """The worlds of the ranks that a command starts, by rank."""
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    )
    # MPICH may put the lines of two ranks into one.
    found = [ast.literal_eval(text) for text in re.findall("{.*?}", ended.stdout)]
    return sorted(found, key=lambda world: world["rank"])


LAUNCHERS = pytest.mark.parametrize(
    "launcher",
    [
        open_mpi,
        mpich,
        srun,
    ],
)


@LAUNCHERS
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_know_their_place(launcher, size):
    found = worlds([*launcher(size), *SHOW_WORLD])
    (job,) = {world.pop("job") for world in found}
    assert job
    assert found == [
        {
            "rank": rank,
            "size": size,
            "local_rank": rank,
            "local_size": size,
            "cross_rank": 0,
            "cross_size": 1,
            "rendezvous": None,
            "host_key": None,
            "way": None,
        }
        for rank in range(size)
    ]


@LAUNCHERS
def test_ranks_reduce_together(launcher, tmp_path):
    loop = Path(__file__).parent / "ranks" / "allreduce_loop.py"
    command = [*launcher(3), sys.executable, loop, tmp_path, "--steps", "20"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("looping") == 3


@LAUNCHERS
@pytest.mark.parametrize("all_output", ["0", "1"])
def test_rank_0_alone_shows_warnings_unless_told(launcher, all_output, monkeypatch):
    monkeypatch.setenv("KERAS_HVD_ALL_OUTPUT", all_output)
    program = (
        "import warnings, keras_hvd; keras_hvd.init(); "
        "warnings.warn(f'of rank {keras_hvd.rank()}')"
    )
    command = [*launcher(2), sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "of rank 0" in ended.stderr
    assert ("of rank 1" in ended.stderr) == (all_output == "1")


@LAUNCHERS
def test_ranks_know_their_job_through_a_shell(launcher):
    shell = ["sh", "-c", '"$0" "$@"; :', *SHOW_WORLD]
    assert len({world["job"] for world in worlds([*launcher(2), *shell])}) == 1


@LAUNCHERS
def test_each_launch_is_a_job_of_its_own(launcher):
    command = [*launcher(1), *SHOW_WORLD]
    assert worlds(command)[0]["job"] != worlds(command)[0]["job"]


@LAUNCHERS
def test_khvdrun_counts_inside_other_launchers(launcher):
    inner = [sys.executable, "-m", "keras_hvd.launch", "--no-prefix", "-np", "2"]
    found = worlds([*launcher(1), *inner, *SHOW_WORLD])
    assert [(world["rank"], world["size"]) for world in found] == [(0, 2), (1, 2)]
    assert found[0]["job"].startswith("khvdrun-")


def test_the_shell_of_salloc_is_alone():
    if not SLURM:
        pytest.skip("no Slurm answers here")
    (world,) = worlds(["salloc", "-Q", "-n", "2", *SHOW_WORLD])
    assert (world["rank"], world["size"]) == (0, 1)


def test_the_shell_of_sbatch_is_alone(tmp_path):
    if not SLURM:
        pytest.skip("no Slurm answers here")
    written = tmp_path / "out"
    script = f"exec {shlex.join(SHOW_WORLD)}"
    command = ["sbatch", "--wait", "-n", "2", "-o", written, "--wrap", script]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    world = ast.literal_eval(written.read_text())
    assert (world["rank"], world["size"]) == (0, 1)


@pytest.mark.parametrize("inner", [open_mpi, mpich])
def test_mpirun_counts_inside_an_allocation(inner):
    if not SLURM:
        pytest.skip("no Slurm answers here")
    found = worlds(["salloc", "-Q", "-n", "2", *inner(2), *SHOW_WORLD])
    assert [(world["rank"], world["size"]) for world in found] == [(0, 2), (1, 2)]


COMMUNICATORS = f"""
import ctypes, sys
from mpi4py import MPI
sys.path.append({str(Path(__file__).parent / "ranks")!r})
from allreduce_loop import SUM, reduce_in_place
import keras_hvd
world = MPI.COMM_WORLD
keras_hvd.init(world.Split(world.rank % 2, -world.rank))
summed = (ctypes.c_int32 * 1)(world.rank)
reduce_in_place("a", summed, SUM)
half = {{"part": [keras_hvd.rank(), keras_hvd.size()], "sum": summed[0]}}
keras_hvd.shutdown()
keras_hvd.init(comm=world)
print({{"rank": keras_hvd.rank(), "size": keras_hvd.size(), **half}}, flush=True)
"""


def test_init_takes_communicators():
    pytest.importorskip("mpi4py")
    found = worlds([*mpich(4), sys.executable, "-c", COMMUNICATORS])
    assert [(each["rank"], each["size"]) for each in found] == [
        (rank, 4) for rank in range(4)
    ]
    # Each half in the reverse order.
    assert [each["part"] for each in found] == [[1, 2], [1, 2], [0, 2], [0, 2]]
    assert [each["sum"] for each in found] == [2, 4, 2, 4]
