"""The GPU that a rank computes on, and the order of the work on it."""

import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from keras_hvd.backends.torch import gpu, gpu_pinning


class Cuda(SimpleNamespace):
    """What `pin_torch` calls of `torch.cuda`, for a machine with some GPUs."""

    def device_count(self) -> int:
        return self.gpus

    def is_initialized(self) -> bool:
        return self.current is not None

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: int) -> None:
        self.current = device


@pytest.mark.parametrize(
    ("gpus", "before", "local_rank", "current"),
    [
        pytest.param(4, None, 3, 3, id="one-each"),
        pytest.param(2, None, 3, 1, id="in-turn"),
        pytest.param(1, None, 3, 0, id="the-only-one"),
        pytest.param(4, 2, 1, 2, id="the-users"),
        pytest.param(0, None, 1, None, id="none"),
    ],
)
def test_each_rank_has_its_gpu(gpus, before, local_rank, current, capfd):
    cuda = Cuda(gpus=gpus, current=before)
    gpu_pinning.pin_torch(cuda, local_rank, 4, {})
    assert cuda.current == current
    assert capfd.readouterr().err == ""


def test_a_gpu_that_was_used_before_init(capfd):
    cuda = Cuda(gpus=2, current=0)
    gpu_pinning.pin_torch(cuda, 1, 2, {})
    assert cuda.current == 0
    assert "call keras_hvd.init() before the first tensor" in capfd.readouterr().err


def test_ranks_that_share_a_gpu_are_told_of_it_once(capfd):
    by_khvdrun = {"KERAS_HVD_RANK": "0"}
    for local_rank in range(2):
        gpu_pinning.pin_torch(Cuda(gpus=1, current=None), local_rank, 2, by_khvdrun)
    assert capfd.readouterr().err.count("2 ranks share 1 GPU") == 1


class Stream:
    device = "cuda:0"

    def __init__(self):
        self.waits_for = []

    def wait_stream(self, other: "Stream") -> None:
        self.waits_for.append(other)


def test_work_of_other_streams_is_waited_for_once(monkeypatch):
    current, other = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    gpu.wait_for([None, other, current, other])
    assert current.waits_for == [other]
    assert other.waits_for == []


def test_the_program_that_tests_a_gpu_passes_without():
    program = pathlib.Path(__file__).parents[2] / "gpu" / "ranks" / "torch_rank.py"
    command = (sys.executable, "-m", "keras_hvd.launch", "-np", "2", sys.executable)
    ended = subprocess.run(
        [*command, program, "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "KERAS_TORCH_DEVICE": "cpu"},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has passed") == 2
