"""An engine that waits for work uses no CPU time: looked at from outside of the job."""

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

RANK = Path(__file__).parent / "ranks" / "idle.py"

# What is measured is the time in which nothing happens.
SECONDS = 3


def threads(process: Path) -> list[Path]:
    return list((process / "task").iterdir())


def name(thread: Path) -> str:
    return (thread / "comm").read_text().strip()


def times_awake(thread: Path) -> int:
    lines = (thread / "status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def nanoseconds(processes: list[Path]) -> dict[Path, int]:
    """The CPU time that each thread has had; some may end meanwhile."""
    used = {}
    for thread in (each for process in processes for each in threads(process)):
        with contextlib.suppress(OSError):
            used[thread] = int((thread / "schedstat").read_text().split()[0])
    return used


def await_rest(engines: list[Path]) -> None:
    """Waits until they sleep until they are rung: their other sleeps are shorter."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        awake = [times_awake(thread) for thread in engines]
        time.sleep(0.7)
        if awake == [times_awake(thread) for thread in engines]:
            return
    raise AssertionError("the engine's threads do not come to rest")


def used_in_a_window(processes: list[Path]) -> dict[Path, int]:
    """The nanoseconds of CPU time that each thread takes."""
    before = nanoseconds(processes)
    time.sleep(SECONDS)
    after = nanoseconds(processes)
    return {thread: used - before.get(thread, 0) for thread, used in after.items()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_job_that_waits_sleeps(khvdrun, tmp_path, ranks):
    pipes = [tmp_path / str(rank) for rank in range(ranks)]
    for pipe in pipes:
        os.mkfifo(pipe)
    with khvdrun.start("-np", ranks, sys.executable, RANK, tmp_path) as job:
        said = [job.stdout.readline().split() for _ in range(ranks)]
        assert sorted(words[:2] for words in said) == [
            [f"[{rank}]", "idle"] for rank in range(ranks)
        ]
        processes = [Path("/proc", words[-1]) for words in said]
        all_threads = [each for process in processes for each in threads(process)]
        engines = [each for each in all_threads if name(each).startswith("keras_hvd")]
        assert len(engines) >= ranks
        await_rest(engines)

        awake = [times_awake(thread) for thread in engines]
        windows = [used_in_a_window(processes)]
        assert awake == [times_awake(thread) for thread in engines]
        # Python and TensorFlow have threads that work now and then; a job that does not
        # sleep would be there in every window.
        while sum(windows[-1].values()) > 20_000_000 * ranks and len(windows) < 5:
            windows.append(used_in_a_window(processes))
        assert sum(windows[-1].values()) <= 20_000_000 * ranks, windows

        for pipe in pipes:
            pipe.write_bytes(b"")
        job.communicate(timeout=60)
    assert job.returncode == 0
