"""The messages of every rank and khvdrun when one rank dies, leaves, stops or errs.

`--kills N` sets at how many random moments a rank is killed; `make soak` says 50, one
in five of them under Keras' `fit`.
"""

import contextlib
import json
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
LOOP = (sys.executable, RANKS / "allreduce_loop.py")
FIT = (sys.executable, RANKS / "fit.py")
FIT_XLA = (*FIT, "--xla")
SESSION = (sys.executable, RANKS / "session.py")

# How soon the survivors must have raised: the first one, and all where no other test
# wants the cores. Beside others, one may wait for a core.
PROMPT_SECONDS = 2.0
LATEST_SECONDS = 10.0

_LEFT = "has left the job"


@dataclass
class Outcome:
    """The end of a job of which a rank failed.

    Args:
        code: The exit code of khvdrun.
        stderr: Its standard error, with that of the ranks.
        survivors: The notes of each rank that raised, by rank.
        processes: The process ids of the ranks, by rank.
    """

    code: int
    stderr: str
    survivors: dict[int, dict]
    processes: dict[int, int]

    @property
    def verdict(self) -> str:
        return self.stderr.splitlines()[-1]


@contextlib.contextmanager
def running(khvdrun, ranks, command, *arguments, records, options=(), **popen):
    """A job whose ranks are all in their loop, and their process ids by rank."""
    whole = ("-np", ranks, *options, *command, records, *arguments)
    with khvdrun.start(*whole, **popen) as job:
        processes = {}
        while len(processes) < ranks:
            line = job.stdout.readline()
            assert line, job.stderr.read()
            words = line.split()
            if words[1:2] == ["looping"]:
                processes[int(words[0].strip("[]"))] = int(words[2])
        try:
            yield job, processes
        finally:
            job.kill()


def outcome(job, processes: dict[int, int], records: Path, timeout=60) -> Outcome:
    """Waits for the end of a job."""
    _, stderr = job.communicate(timeout=timeout)
    survivors = {
        int(path.stem): json.loads(path.read_text()) for path in records.glob("*.json")
    }
    return Outcome(job.returncode, stderr, survivors, processes)


def time_of_deed(records: Path) -> float:
    """When the culprit did what it was told (`time.monotonic`)."""
    return float((records / "deed").read_text())


@pytest.fixture(autouse=True)
def latest_seconds(is_soak, monkeypatch) -> None:
    """In a soak, no other test runs."""
    if is_soak:
        monkeypatch.setattr(sys.modules[__name__], "LATEST_SECONDS", PROMPT_SECONDS)


def check_survivors(ended: Outcome, culprit: int, since: float, how: str) -> None:
    """Checks that all ranks but one raised in time, and their messages."""
    others = ended.processes.keys() - {culprit}
    assert ended.survivors.keys() == others, ended.stderr
    named = f"rank {culprit} (pid {ended.processes[culprit]} on "
    for rank, note in ended.survivors.items():
        assert named in note["text"]
        assert note["type"] in ("RankFailedError", "AbortedError")
        assert f"failed on rank {rank}: " in note["text"]
        assert how in note["text"]
        delay = note["at"] - since
        assert 0 <= delay < LATEST_SECONDS, f"rank {rank} raised after {delay:.3f} s"
    assert min(note["at"] for note in ended.survivors.values()) - since < PROMPT_SECONDS


def kill_at_random(khvdrun, command, records: Path, seed: int, ranks=4) -> float:
    """Kills one of the ranks at a random moment and checks all that follows.

    Returns:
        Seconds from the kill until the last survivor raised.
    """
    chance = random.Random(seed)
    culprit = chance.randrange(ranks)
    with running(khvdrun, ranks, command, records=records) as (job, processes):
        # Tests a random moment; nothing waits for this.
        time.sleep(chance.uniform(0, 0.3))
        since = time.monotonic()
        os.kill(processes[culprit], signal.SIGKILL)
        ended = outcome(job, processes, records)
    check_survivors(ended, culprit, since, "SIGKILL")
    assert ended.code == 128 + signal.SIGKILL
    assert ended.verdict == (
        f"khvdrun: rank {culprit} (process {processes[culprit]}) failed first: it was "
        "killed by signal 9 (SIGKILL)"
    )
    assert khvdrun.processes() == []
    return max(note["at"] for note in ended.survivors.values()) - since


def test_a_killed_rank_in_a_loop_of_allreduces(khvdrun, tmp_path, kill, delays):
    delays.append(kill_at_random(khvdrun, LOOP, tmp_path, seed=kill))


@pytest.fixture
def ranks_in_fit(is_soak) -> int:
    """Each of them takes long to start."""
    return 4 if is_soak else 3


def test_a_killed_rank_in_fit(khvdrun, tmp_path, fit_kill, delays, ranks_in_fit):
    delays.append(kill_at_random(khvdrun, FIT, tmp_path, fit_kill, ranks_in_fit))


def test_a_killed_rank_in_a_compiled_fit(
    khvdrun, tmp_path, fit_kill, delays, ranks_in_fit
):
    seed = 1000 + fit_kill
    delays.append(kill_at_random(khvdrun, FIT_XLA, tmp_path, seed, ranks_in_fit))


def test_a_killed_rank_in_a_monitored_session(khvdrun, tmp_path):
    # Such a session begins anew after an error that it takes for the loss of a server.
    with running(khvdrun, 2, SESSION, records=tmp_path) as (job, processes):
        since = time.monotonic()
        os.kill(processes[1], signal.SIGKILL)
        ended = outcome(job, processes, tmp_path)
    check_survivors(ended, 1, since, "SIGKILL")
    assert "after khvdrun told it to end" not in ended.stderr


def test_survivors_end_by_themselves_where_ranks_share_cores(
    khvdrun, tmp_path, is_soak
):
    # Eight ranks, and a process of another job, want each core.
    command = FIT if is_soak else LOOP
    ranks = 8 * len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(other.wait)
            stack.callback(other.kill)
        # Other tests want the cores as well.
        patient = ("--term-after", 20)
        running_job = running(
            khvdrun, ranks, command, records=tmp_path, options=patient
        )
        job, processes = stack.enter_context(running_job)
        os.kill(processes[1], signal.SIGKILL)
        ended = outcome(job, processes, tmp_path)
    assert ended.survivors.keys() == processes.keys() - {1}
    assert "after khvdrun told it to end" not in ended.stderr
    for rank in ended.survivors:
        assert f"khvdrun: rank {rank} ended with exit code 1" in ended.stderr


def test_a_survivor_needs_little_of_a_core_to_end(tmp_path):
    # A rank that has imported TensorFlow; how much each needs to end, in time of a
    # core, says how long many on a few cores take, and depends on no other load.
    place = {"JOB": uuid.uuid4().hex, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    place |= {"SIZE": 2, "LOCAL_SIZE": 2}
    ranks = []
    for rank in range(2):
        own = place | {"RANK": rank, "LOCAL_RANK": rank}
        own = {f"KERAS_HVD_{name}": str(value) for name, value in own.items()}
        # Without tests/imports, after which Python ends soon in any case.
        own["PYTHONPATH"] = ""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        started = subprocess.Popen([*FIT, tmp_path], env={**os.environ, **own}, **pipes)
        ranks.append(started)
    for rank in ranks:
        with rank.stdout:
            assert rank.stdout.readline().startswith(b"looping"), "it has not started"
    ranks[0].kill()
    ranks[0].wait()
    _, status, used = os.wait4(ranks[1].pid, 0)
    ranks[1].returncode = os.waitstatus_to_exitcode(status)
    assert ranks[1].returncode == 1
    note = json.loads((tmp_path / "1.json").read_text())
    needed = used.ru_utime + used.ru_stime - note["cpu"]
    assert needed < 0.7, f"{needed:.2f} s of a core between its error and its end"


def test_a_name_of_many_bytes_is_shown_by_its_ends(khvdrun, tmp_path):
    # Whole, one of 64 MiB took a minute to pass on.
    options = ("--culprit", 1, "--deed", "raise", "--at", 2)
    options += ("--name-bytes", 8 << 20)
    ended = khvdrun.run("-np", 3, *LOOP, tmp_path, *options)
    assert len(ended.stderr) < 20_000
    notes = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(notes) == 2
    for note in notes:
        assert re.search(r"'step \d+ x+\.\.\.x+' \(8388615 bytes\)", note["text"])
        assert len(note["text"]) < 2000


def test_a_killed_rank_that_holds_much_memory(khvdrun, tmp_path, is_soak):
    # The kernel takes seconds to free 8 GiB, and no survivor may wait that long.
    size = 8 << 30 if is_soak else 2 << 30
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < size + (2 << 30):
        pytest.skip(f"needs {size >> 30} GiB of free memory and 2 more")
    options = ("--culprit", 2, "--resident-bytes", size)
    with running(khvdrun, 4, LOOP, *options, records=tmp_path) as (job, processes):
        since = time.monotonic()
        os.kill(processes[2], signal.SIGKILL)
        ended = outcome(job, processes, tmp_path)
    check_survivors(ended, 2, since, "SIGKILL")
    assert ended.code == 128 + signal.SIGKILL
    assert f"rank 2 (process {processes[2]}) failed first" in ended.verdict


@pytest.mark.parametrize("with_core", [False, True], ids=["no-core", "core"])
@pytest.mark.parametrize("deed", ["crash", "abort"])
def test_a_crashing_rank(khvdrun, tmp_path, deed, with_core):
    number = signal.SIGSEGV if deed == "crash" else signal.SIGABRT
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]

    def limit_core():
        resource.setrlimit(resource.RLIMIT_CORE, (hard if with_core else 0, hard))

    # A large core takes its time to be written; the others must not wait for it.
    options = ("--culprit", 1, "--deed", deed, "--resident-bytes", 1 << 30)
    popen = {"preexec_fn": limit_core, "cwd": tmp_path}
    with running(khvdrun, 4, LOOP, *options, records=tmp_path, **popen) as (job, ranks):
        ended = outcome(job, ranks, tmp_path)
    since = time_of_deed(tmp_path)
    check_survivors(ended, 1, since, f"crashed with {number.name}")
    assert ended.code == 128 + number
    assert f"killed by signal {number:d} ({number.name})" in ended.verdict
    if not with_core:
        assert "core dumped" not in ended.verdict


@pytest.mark.parametrize("deed", ["exit", "vanish"])
def test_a_rank_that_leaves_with_code_0(khvdrun, tmp_path, deed):
    options = ("--culprit", 0, "--deed", deed)
    with running(khvdrun, 4, LOOP, *options, records=tmp_path) as (job, processes):
        ended = outcome(job, processes, tmp_path)
    since = time_of_deed(tmp_path)
    # How a process has ended is known once its parent has asked, which may take long.
    how = _LEFT if deed == "exit" else "exit"
    check_survivors(ended, 0, since, how)
    assert ended.code == 1
    assert ended.verdict == (
        "khvdrun: rank 0 had left with exit code 0 while others still waited for it: "
        "all ranks must make the same collective calls (look for one that is inside "
        "`if keras_hvd.rank() == 0:`)"
    )


def test_a_rank_that_becomes_another_program(khvdrun, tmp_path):
    options = ("--culprit", 1, "--deed", "exec")
    with running(khvdrun, 3, LOOP, *options, records=tmp_path) as (job, processes):
        ended = outcome(job, processes, tmp_path)
    since = time_of_deed(tmp_path)
    check_survivors(ended, 1, since, "called exec: its process runs 'sleep' now")


def test_a_rank_that_raises_an_error_of_its_own(khvdrun, tmp_path):
    options = ("--culprit", 3, "--deed", "raise")
    with running(khvdrun, 4, LOOP, *options, records=tmp_path) as (job, processes):
        ended = outcome(job, processes, tmp_path)
    since = time_of_deed(tmp_path)
    check_survivors(ended, 3, since, _LEFT)
    assert ended.code == 1
    lines = ended.stderr.splitlines()
    assert f"rank 3 (process {processes[3]}) failed first" in lines[-1]
    assert lines[-2] == "khvdrun:     ValueError: this rank's own error"


def test_a_rank_that_shuts_down_early(khvdrun, tmp_path):
    options = ("--culprit", 1, "--deed", "shutdown")
    with running(khvdrun, 3, LOOP, *options, records=tmp_path) as (job, processes):
        ended = outcome(job, processes, tmp_path)
    since = time_of_deed(tmp_path)
    own = ended.survivors.pop(1)
    assert own["type"] in ("ShutDownError", "NotInitializedError")
    check_survivors(ended, 1, since, _LEFT)
    assert f"rank 1 (process {processes[1]}) failed first" in ended.verdict


def stall_environment(warning: float, abort: float) -> dict[str, str]:
    return {
        "KERAS_HVD_STALL_WARNING_SECONDS": str(warning),
        "KERAS_HVD_STALL_ABORT_SECONDS": str(abort),
    }


def read_until(job, wanted: str) -> str:
    """Reads lines of stderr up to one that contains `wanted`."""
    seen = ""
    while wanted not in seen:
        line = job.stderr.readline()
        assert line, f"{wanted!r} never came:\n{seen}"
        seen += line
    return seen


def test_a_stopped_rank_is_waited_for(khvdrun, tmp_path):
    options = ("--culprit", 2, "--deed", "stop", "--steps", 30)
    popen = {"env": stall_environment(0.5, 0)}
    with running(khvdrun, 4, LOOP, *options, records=tmp_path, **popen) as (job, ranks):
        warning = read_until(job, "its process is stopped")
        assert f"rank 2 (pid {ranks[2]} on " in warning
        os.kill(ranks[2], signal.SIGCONT)
        ended = outcome(job, ranks, tmp_path)
    assert ended.code == 0, ended.stderr
    assert ended.survivors == {}


@pytest.mark.parametrize(("culprit", "size"), [(0, 2), (0, 4), (2, 4)])
def test_a_stopped_rank_ends_the_job_if_asked_to(khvdrun, tmp_path, culprit, size):
    options = ("--culprit", culprit, "--deed", "stop")
    popen = {"env": stall_environment(0.5, 1.5), "records": tmp_path}
    # The stopped rank cannot end by itself.
    popen["options"] = ("--term-after", 2)
    with running(khvdrun, size, LOOP, *options, **popen) as (job, ranks):
        ended = outcome(job, ranks, tmp_path)
    since = time_of_deed(tmp_path)
    assert ended.survivors.keys() == {*range(size)} - {culprit}
    for note in ended.survivors.values():
        assert note["type"] == "RankFailedError"
        assert f"rank {culprit} (pid {ranks[culprit]} on " in note["text"]
        assert 1 < note["at"] - since < 1.5 + LATEST_SECONDS
    assert ended.code == 1
    assert f"rank {culprit} was killed by signal 15" in ended.stderr
    assert "stopped by a signal until then" in ended.stderr


def test_a_tensor_that_one_rank_never_submits(khvdrun, tmp_path):
    # It goes on with the next name instead, so that each waits for the other.
    options = ("--culprit", 1, "--deed", "skip", "--at", 15)
    popen = {"env": stall_environment(0.5, 1.5)}
    with running(khvdrun, 4, LOOP, *options, records=tmp_path, **popen) as (job, ranks):
        read_until(job, "for allreduce 'step 5', which not every rank has reached")
        read_until(job, f"rank 1 (pid {ranks[1]} on ")
        ended = outcome(job, ranks, tmp_path)
    assert ended.survivors.keys() == {0, 1, 2, 3}
    assert {note["type"] for note in ended.survivors.values()} == {"RankFailedError"}
    assert all("step 5" in ended.survivors[rank]["text"] for rank in (0, 2, 3))
    assert ended.code == 1


def test_a_tensor_that_one_rank_never_submits_is_waited_for(khvdrun, tmp_path):
    options = ("--culprit", 1, "--deed", "skip", "--at", 15)
    popen = {"env": stall_environment(0.3, 0)}
    with running(khvdrun, 4, LOOP, *options, records=tmp_path, **popen) as (job, ranks):
        read_until(job, "step 5")
        # Many times the limit for the warning, and still no rank gives up.
        assert select.select([], [], [], 2) == ([], [], [])
        assert job.poll() is None
        terminated = time.monotonic()
        job.terminate()
        ended = outcome(job, ranks, tmp_path)
    # Ranks to which the signal comes later may have seen it end another.
    for survivor in ended.survivors.values():
        assert survivor["at"] > terminated
        assert "was killed by SIGTERM" in survivor["text"]
    assert ended.code == 128 + signal.SIGTERM


def test_a_forked_child_is_no_rank(khvdrun, tmp_path):
    options = ("--culprit", 1, "--deed", "fork", "--steps", 40)
    ended = khvdrun.run("-np", 2, *LOOP, tmp_path, *options)
    assert ended.returncode == 0, ended.stderr
    assert "[1] child: ForkedError: " in ended.stdout


def test_a_rank_that_never_starts(khvdrun, tmp_path):
    script = 'if [ $KERAS_HVD_RANK = 1 ]; then exec sleep 100; else exec "$0" "$@"; fi'
    ended = khvdrun.run(
        *("-np", 2, "--term-after", 0.2, "sh", "-c", script, *LOOP, tmp_path),
        env={"KERAS_HVD_INIT_TIMEOUT_SECONDS": "1"},
    )
    assert ended.returncode == 1
    assert "failed first: it ended with exit code 1" in ended.stderr.splitlines()[-1]
    own = [line for line in ended.stderr.splitlines() if line.startswith("[0] ")]
    assert len(own) == 1, ended.stderr
    assert own[0].startswith(
        "[0] keras_hvd.exceptions.RankFailedError: rank 0 could not"
    )
    assert "rank 1" in own[0]
