"""The consistency mode, KERAS_HVD_CHECK=1: results are compared between the ranks."""

import re
import subprocess
from pathlib import Path

import pytest

FAILURES = Path(__file__).parents[2] / "docs" / "failures.md"
SCRIPT = Path(__file__).parent / "ranks" / "checked.py"


@pytest.fixture
def run(in_second_job):
    """Runs this rank's part of a second job with the mode on or off."""

    def run(*arguments: str, check: str) -> subprocess.CompletedProcess:
        return in_second_job(SCRIPT, *arguments, KERAS_HVD_CHECK=check)

    return run


def test_equal_results_pass(run):
    done = run("right", check="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


def test_a_result_that_differs_on_one_rank_is_named_on_all(several_ranks, run, rank):
    done = run("wrong", check="1")
    assert done.returncode == 1
    # The report of rank 0, which waits for other hosts' words, may come after it.
    lines = done.stderr.splitlines()
    error = next(line for line in lines if line.startswith("keras_hvd.exceptions."))
    page = " ".join(FAILURES.read_text().split())
    (documented,) = re.findall(r"allreduce [^:]*: the result .* \(hashes: rank", page)
    for shown, here in (
        ("train_step/allreduce", "gradients"),
        ("rank 0", f"rank {rank}"),
        ("tensor 3 of 8", "tensor 2 of 3"),
    ):
        documented = documented.replace(shown, here)
    assert error.startswith(f"keras_hvd.exceptions.KerasHvdError: {documented}")
    assert "rank 1: " in error


def test_nobody_looks_if_rank_0_does_not(several_ranks, run, rank):
    done = run("wrong", check="0" if rank == 0 else "1")
    assert done.returncode == 0, done.stderr


def test_everybody_looks_if_rank_0_does(several_ranks, run, rank):
    done = run("wrong", check="1" if rank == 0 else "0")
    assert done.returncode == 1
    assert "'gradients' differs between ranks" in done.stderr
