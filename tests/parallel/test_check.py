"""The consistency mode, KERAS_HVD_CHECK=1: results are compared between the ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import keras_hvd

SCRIPT = Path(__file__).parent / "ranks" / "checked.py"


@pytest.fixture
def run(rank, size):
    """Runs this rank's part of a second job, the same way on every rank."""

    def in_second_job(*arguments: str, check: str) -> subprocess.CompletedProcess:
        job = keras_hvd.broadcast_object(f"check-{os.urandom(8).hex()}", 0)
        second = {
            "KERAS_HVD_RANK": str(rank),
            "KERAS_HVD_SIZE": str(size),
            "KERAS_HVD_LOCAL_RANK": str(rank),
            "KERAS_HVD_LOCAL_SIZE": str(size),
            "KERAS_HVD_JOB": job,
            "KERAS_HVD_CHECK": check,
        }
        command = [sys.executable, SCRIPT, *arguments]
        done = subprocess.run(
            command, env={**os.environ, **second}, capture_output=True, text=True
        )
        keras_hvd.barrier()
        return done

    return in_second_job


def test_equal_results_pass(run):
    done = run("right", check="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


def test_a_result_that_differs_on_one_rank_is_named_on_all(several_ranks, run, rank):
    done = run("wrong", check="1")
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith(
        "keras_hvd.exceptions.KerasHvdError: allreduce 'gradients' failed on rank "
        f"{rank}: the result of tensor 2 of 3 of allreduce 'gradients' differs between "
        "ranks (hashes: rank"
    )
    assert "rank 1: " in error


def test_nobody_looks_if_rank_0_does_not(several_ranks, run, rank):
    done = run("wrong", check="0" if rank == 0 else "1")
    assert done.returncode == 0, done.stderr


def test_everybody_looks_if_rank_0_does(several_ranks, run, rank):
    done = run("wrong", check="1" if rank == 0 else "0")
    assert done.returncode == 1
    assert "'gradients' differs between ranks" in done.stderr
