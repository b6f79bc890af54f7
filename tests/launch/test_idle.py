"""An engine that waits for work uses no CPU time: looked at from outside of the job."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RANK = Path(__file__).parent / "ranks" / "idle.py"

# What is measured is the time in which nothing happens.
SECONDS = 3


def start(khvdrun, hosts: list[int], *command: object) -> list[subprocess.Popen]:
    """A khvdrun for each host, of so many ranks; all are this machine."""
    if len(hosts) == 1:
        return [khvdrun.start("-np", hosts[0], *command)]
    with socket.create_server(("127.0.0.1", 0)) as found:
        rendezvous = f"127.0.0.1:{found.getsockname()[1]}"
    job = ("--nnodes", len(hosts), "--rendezvous", rendezvous)
    return [
        khvdrun.start(
            *(*job, "--node-rank", number, "-np", ranks, *command),
            env={
                "KERAS_HVD_HOST_KEY": str(number),
                "KERAS_HVD_SECRET": "0123456789abcdef of tests",
            },
        )
        for number, ranks in enumerate(hosts)
    ]


def of_each_thread(process: Path, read: Callable[[Path], Any]) -> dict[Path, Any]:
    """What `read` finds of each thread; some may end meanwhile."""
    found = {}
    for thread in (process / "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[thread] = read(thread)
    return found


def name(thread: Path) -> str:
    return (thread / "comm").read_text().strip()


def times_awake(thread: Path) -> int:
    lines = (thread / "status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def nanoseconds(thread: Path) -> int:
    return int((thread / "schedstat").read_text().split()[0])


def await_rest(engines: list[Path]) -> None:
    """Waits until they sleep until they are rung: their other sleeps are shorter."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        awake = [times_awake(thread) for thread in engines]
        time.sleep(0.7)
        if awake == [times_awake(thread) for thread in engines]:
            return
    raise AssertionError("the engine's threads do not come to rest")


def used_in_a_window(processes: list[Path]) -> list[dict[Path, int]]:
    """The nanoseconds of CPU time that each thread of each process takes."""
    before = [of_each_thread(process, nanoseconds) for process in processes]
    time.sleep(SECONDS)
    after = [of_each_thread(process, nanoseconds) for process in processes]
    return [
        {thread: used - old.get(thread, 0) for thread, used in new.items()}
        for old, new in zip(before, after, strict=True)
    ]


def most_of_a_process(window: list[dict[Path, int]]) -> int:
    return max(sum(used.values()) for used in window)


@pytest.mark.parametrize("hosts", [[1], [2], [4], [2, 2]])
def test_a_job_that_waits_sleeps(khvdrun, tmp_path, hosts):
    pipes = [tmp_path / str(rank) for rank in range(sum(hosts))]
    for pipe in pipes:
        os.mkfifo(pipe)
    with contextlib.ExitStack() as started:
        jobs = [
            started.enter_context(job)
            for job in start(khvdrun, hosts, sys.executable, RANK, tmp_path)
        ]
        said = [
            job.stdout.readline().split()
            for job, ranks in zip(jobs, hosts, strict=True)
            for _ in range(ranks)
        ]
        assert sorted(words[:2] for words in said) == [
            [f"[{rank}]", "idle"] for rank in range(sum(hosts))
        ]
        processes = [Path("/proc", words[-1]) for words in said]
        engines = []
        for process in processes:
            names = of_each_thread(process, name)
            own = [each for each in names if names[each].startswith("keras_hvd")]
            assert own, names
            engines += own
        await_rest(engines)

        awake = [times_awake(thread) for thread in engines]
        windows = [used_in_a_window(processes)]
        assert awake == [times_awake(thread) for thread in engines]
        used = {each: of for process in windows[0] for each, of in process.items()}
        assert all(used[thread] < 1_000_000 for thread in engines), used
        # Python and TensorFlow have threads that work now and then; a job that does not
        # sleep would be there in every window.
        while most_of_a_process(windows[-1]) > 20_000_000 and len(windows) < 5:
            windows.append(used_in_a_window(processes))
        assert most_of_a_process(windows[-1]) <= 20_000_000, windows

        for pipe in pipes:
            pipe.write_bytes(b"")
        for job in jobs:
            job.communicate(timeout=60)
    assert all(job.returncode == 0 for job in jobs)
