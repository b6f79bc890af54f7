"""The engine's GPU path at the C API, on real GPUs or over the stand-ins.

Each test runs with NCCL and through host memory, with one, two and four ranks on one
GPU, and with one on each GPU of several.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

CUDA = Path(__file__).parent / "ranks" / "cuda.py"

# The memory of a GPU that other processes may have taken meanwhile.
SLACK_BYTES = 64 << 20

THROUGH_HOST = "go through host memory, which is slow"


def check_path(job, path: str) -> None:
    """The tensors went the way that is tested; if not NCCL's, rank 0 said so.

    A rank alone asks for neither.
    """
    texts = [job.errors(rank) for rank in range(len(job.processes))]
    said = [text.count(THROUGH_HOST) for text in texts]
    others = [0] * (len(texts) - 1)
    assert said == [int(path == "host" and len(others) > 0), *others], texts


@pytest.mark.parametrize("check", [False, True], ids=["", "compared"])
def test_all_collectives(start, path, check):
    job = start(task="collectives", check=check)
    said = job.end(300)
    assert all(lines == said[0] for lines in said)
    assert said[0][0]["cases"] > 100
    check_path(job, path)


def test_random_steps(start, path, request, tmp_path):
    steps = request.config.getoption("--steps")
    seed = request.config.getoption("--random-seed")
    timeline = tmp_path / "timeline.json"
    job = start(task="steps", steps=steps, seed=seed, timeline=str(timeline))
    assert job.end(600) == [[{"steps": steps}]] * len(job.processes)
    check_path(job, path)
    moved_by = "COPY_ON_GPU" if len(job.processes) == 1 else path
    check_timeline(json.loads(timeline.read_text()), moved_by)


def check_timeline(events: list[dict], moved_by: str) -> None:
    """The work on rank 0's GPU is in one row, each piece behind the one before."""
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    names = {span["name"] for span in spans}
    assert "WAIT_FOR_INPUTS" in names
    assert "COPY_TO_GPU" in names or moved_by != "host"
    assert any(name.startswith("NCCL_") for name in names) == (moved_by == "NCCL")
    assert ("COPY_ON_GPU" in names) == (moved_by == "COPY_ON_GPU")
    reached = 0
    for span in spans:
        assert span["ts"] >= reached - 1e-3, span
        assert 0 <= span["args"]["within"] < 1e6, span
        reached = span["ts"] + span["dur"]


def test_a_kill_is_known_and_leaves_nothing(start, gpus, setup):
    if setup.ranks == 1:
        pytest.skip("a rank alone has nobody to know")
    before = [free_bytes(gpus, device) for device in set(setup.devices)]
    job = start(task="loop")
    for rank in range(setup.ranks):
        assert job.line(rank) == {"looping": True}
    *_, culprit = range(setup.ranks)
    killed = job.processes[culprit]
    since = time.monotonic()
    killed.kill()
    for rank in range(culprit):
        line = job.line(rank, 20)
        assert f"rank {culprit} (pid {killed.pid} on " in line["text"]
        assert line["at"] - since < 2
    killed.wait()
    killed.stdout.close()
    job.processes.remove(killed)
    job.end(20)
    for device, earlier in zip(set(setup.devices), before):
        await_memory(gpus, device, earlier)


def free_bytes(gpus, device: int) -> int | None:
    """How much of a GPU's memory is free, as a process of its own sees it."""
    command = [sys.executable, CUDA, gpus.cuda, str(device)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    text = ended.stdout.strip()
    return None if text == "None" else int(text)


def await_memory(gpus, device: int, earlier: int | None) -> None:
    """The driver takes a moment to take back the memory of a killed process."""
    deadline = time.monotonic() + 20
    while True:
        now = free_bytes(gpus, device)
        if earlier is None or now > earlier - SLACK_BYTES:
            return
        assert time.monotonic() < deadline, f"{earlier - now} bytes are still taken"
