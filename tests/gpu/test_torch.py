"""Collectives and a training through torch, where it sees a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).parent / "ranks" / "torch_rank.py"
COUNT = "import torch, keras, keras_hvd; print(torch.cuda.device_count())"


def run(*command: object, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "KERAS_BACKEND": "torch", **variables},
    )


@pytest.fixture(scope="module")
def devices(gpus) -> int:
    """How many GPUs torch sees; without one the test is skipped."""
    asked = run(sys.executable, "-c", COUNT)
    if asked.returncode != 0:
        pytest.skip(f"no torch with keras_hvd: {asked.stderr.splitlines()[-1]}")
    if asked.stdout.strip() == "0":
        pytest.skip("torch sees no GPU")
    return int(asked.stdout)


@pytest.mark.parametrize("path", ["NCCL"], indirect=True)
def test_collectives_and_training(setup, devices):
    ended = run(
        *(sys.executable, "-m", "keras_hvd.launch", "-np", setup.ranks),
        *(sys.executable, RANK, "cuda"),
        NCCL_MULTI_RANK_GPU_ENABLE="1",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has passed") == setup.ranks
