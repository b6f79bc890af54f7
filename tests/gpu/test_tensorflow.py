"""Collectives and a training through TensorFlow, where it sees a GPU."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).parent / "ranks" / "tensorflow_rank.py"
SAVING = Path(__file__).parents[1] / "launch" / "ranks" / "saving.py"
KHVDRUN = (sys.executable, "-m", "keras_hvd.launch")
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}

COUNT = (
    "import tensorflow as tf; import keras_hvd; "
    "print(len(tf.config.list_physical_devices('GPU')))"
)
# TensorFlow has begun before `init`.
LATE = (
    "import tensorflow as tf; import keras_hvd; tf.constant(1.0) + 1; "
    "keras_hvd.init(); print('initialised')"
)


def run(*command: object, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **variables},
    )


@pytest.fixture(scope="module")
def devices(gpus) -> int:
    """How many GPUs TensorFlow sees; without one the test is skipped."""
    asked = run(sys.executable, "-c", COUNT)
    if asked.returncode != 0:
        pytest.skip(f"no TensorFlow with keras_hvd: {asked.stderr.splitlines()[-1]}")
    if asked.stdout.strip() == "0":
        pytest.skip("TensorFlow sees no GPU")
    return int(asked.stdout)


@pytest.mark.parametrize("path", ["NCCL"], indirect=True)
def test_collectives_and_training(setup, devices):
    command = (*KHVDRUN, "-np", setup.ranks, sys.executable, RANK, "GPU")
    ended = run(*command, **SHARING)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has passed") == setup.ranks


@pytest.mark.parametrize("way", ["optimizer", "strategy"])
def test_nothing_is_saved_of_a_step_that_a_death_aborts(tmp_path, devices, way):
    command = (sys.executable, SAVING, tmp_path, way, "within")
    ended = run(*KHVDRUN, "-np", 2, "--term-after", 60, *command, **SHARING)
    assert ended.returncode == 128 + signal.SIGKILL, ended.stderr
    note = json.loads((tmp_path / "0.json").read_text())
    # The step itself may have met the failure, or only the callback after it.
    assert note["fit"] in ("AbortedError", "InternalError", "RankFailedError"), note
    assert note["refused"] == note["refused after shutdown"] != []
    assert not note["changed"]


def test_tensorflow_that_began_before_init(devices):
    ended = run(*KHVDRUN, "-np", max(2, devices), sys.executable, "-c", LATE, **SHARING)
    assert ended.returncode == 0, ended.stderr
    assert "call keras_hvd.init() before the first tensor is made" in ended.stderr


def test_a_scheduler_gives_each_rank_its_gpu(devices):
    program = (
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '0'; import keras_hvd; "
        "import tensorflow as tf; keras_hvd.init(); "
        "print(len(tf.config.get_visible_devices('GPU')), 'visible')"
    )
    ended = run(*KHVDRUN, "-np", 2, sys.executable, "-c", program, **SHARING)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("1 visible") == 2
