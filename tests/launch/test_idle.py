"""An engine that waits for work uses no CPU time: looked at from outside of the job."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from free_port import free_port

RANK = Path(__file__).parent / "ranks" / "idle.py"

# The window of a measurement, in which nothing happens.
SECONDS = 3

# The ranks of each host.
JOBS = [[1], [3], [2, 1]]


def start(khvdrun, hosts: list[int], *command: object) -> list[subprocess.Popen]:
    """A khvdrun for each host, with its ranks; all are this machine."""
    if len(hosts) == 1:
        return [khvdrun.start("-np", hosts[0], *command)]
    job = ("--nnodes", len(hosts), "--rendezvous", f"127.0.0.1:{free_port()}")
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
    """The result of `read` for each thread; some may end meanwhile."""
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


Window = dict[Path, dict[Path, int]]


def used_in_a_window(processes: list[Path]) -> Window:
    """The nanoseconds of CPU time that each thread of each process takes."""
    before = [of_each_thread(process, nanoseconds) for process in processes]
    time.sleep(SECONDS)
    after = [of_each_thread(process, nanoseconds) for process in processes]
    return {
        process: {thread: used - old.get(thread, 0) for thread, used in new.items()}
        for process, old, new in zip(processes, before, after, strict=True)
    }


def sleeps(job: list[Path], window: Window) -> bool:
    return all(sum(window[process].values()) <= 20_000_000 for process in job)


def waiting_ranks(khvdruns: list[subprocess.Popen], hosts: list[int]) -> list[Path]:
    """The processes of a job's ranks, which all have nothing more to do."""
    said = [
        job.stdout.readline().split()
        for job, ranks in zip(khvdruns, hosts, strict=True)
        for _ in range(ranks)
    ]
    assert sorted(words[:2] for words in said) == [
        [f"[{rank}]", "idle"] for rank in range(sum(hosts))
    ]
    return [Path("/proc", words[-1]) for words in said]


def engine_threads(process: Path) -> list[Path]:
    names = of_each_thread(process, name)
    own = [each for each in names if names[each].startswith("keras_hvd")]
    assert own, names
    return own


# All of them at once: most of the time nothing happens.
def test_jobs_that_wait_sleep(khvdrun, tmp_path):
    with contextlib.ExitStack() as started:
        khvdruns, pipes = [], []
        for number, hosts in enumerate(JOBS):
            folder = tmp_path / str(number)
            folder.mkdir()
            pipes += [folder / str(rank) for rank in range(sum(hosts))]
            for pipe in pipes[-sum(hosts) :]:
                os.mkfifo(pipe)
            of_job = start(khvdrun, hosts, sys.executable, RANK, folder)
            khvdruns.append([started.enter_context(each) for each in of_job])
        jobs = [waiting_ranks(*each) for each in zip(khvdruns, JOBS, strict=True)]
        processes = [process for job in jobs for process in job]
        engines = [each for process in processes for each in engine_threads(process)]
        await_rest(engines)

        awake = [times_awake(thread) for thread in engines]
        windows = [used_in_a_window(processes)]
        assert awake == [times_awake(thread) for thread in engines]
        used = {each: of for own in windows[0].values() for each, of in own.items()}
        assert all(used[thread] < 1_000_000 for thread in engines), used
        # Python and TensorFlow have threads that work now and then; a job that does not
        # sleep would be there in every window.
        restless = [job for job in jobs if not sleeps(job, windows[0])]
        while restless and len(windows) < 5:
            windows.append(used_in_a_window(processes))
            restless = [job for job in restless if not sleeps(job, windows[-1])]
        assert not restless, windows

        for pipe in pipes:
            pipe.write_bytes(b"")
        for job in sum(khvdruns, []):
            job.communicate(timeout=60)
            assert job.returncode == 0
