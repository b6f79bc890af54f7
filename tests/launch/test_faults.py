"""Random collectives under faults, against NumPy: late, killed and stopped ranks.

The faults come right before what other ranks act on, and after what comes from other
hosts, in libraries that were built for it (tf_ops/transport/faults.h; `--faults`, as in
`make soak`). With the ordinary libraries only the collectives are tested. What happens
follows from `--seed`, which the errors name, but for how the processes are scheduled.
"""

import json
import math
import os
import random
import re
import signal
import sys
from pathlib import Path

import pytest

MIXED = (sys.executable, Path(__file__).parent / "ranks" / "mixed.py")

# A point at which a rank is killed or stopped is one of so many: from the first ones,
# in the rendezvous, to those of some dozens of steps.
POINTS = 5000

LEFT_START = re.compile("rank 0 ended while the job started|could not start: ")
STOPPED = re.compile(r"rank (?P<rank>\d) \(pid (?P<pid>\d+) .*process is stopped")


# Ranks of each host.
HOSTS = [(4,), (2, 2), (1, 1, 1, 1)]


def ended_on_hosts(start, counts, records, *options) -> list[tuple[int, str, str]]:
    """The exit codes, outputs and errors of the hosts' khvdruns."""
    jobs = [
        start(number, len(counts), "-np", count, *MIXED, records, *options)
        for number, count in enumerate(counts)
    ]
    outputs = [job.communicate(timeout=500) for job in jobs]
    return [(job.returncode, *output) for job, output in zip(jobs, outputs)]


def faulty_engine(folder: Path | None) -> tuple[object, ...]:
    if folder is None:
        pytest.skip("needs libraries with faults: make soak")
    return ("--engine", folder, "--delay", 1000)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("counts", HOSTS)
def test_many_steps_are_right(start, tmp_path, seed, faults, is_soak, figures, counts):
    delays = () if faults is None else faulty_engine(faults)
    steps = 1000 if is_soak else 50
    options = ("--seed", seed, "--steps", steps, *delays)
    for code, output, error in ended_on_hosts(start, counts, tmp_path, *options):
        assert code == 0, error
        assert error == ""
        assert output.count("lost 0 wakes") == counts[0], output
    figures.append(f"{steps} random steps on {counts} ranks were right (--seed {seed})")


@pytest.mark.parametrize("counts", HOSTS)
def test_a_rank_killed_at_a_point(start, tmp_path, faults, point_kill, seed, counts):
    seed = 1000 * seed + point_kill
    chance = random.Random(seed)
    culprit = chance.randrange(4)
    # Each number is as likely as its half.
    point = int(math.exp(chance.uniform(0, math.log(POINTS))))
    options = ("--seed", seed, "--culprit", culprit, "--kill-at", point)
    engine = faulty_engine(faults)
    ended = ended_on_hosts(start, counts, tmp_path, *options, *engine)
    told = f"seed {seed}, point {point}:\n{ended}"
    code, _, error = ended[culprit // counts[0]]
    assert code == 128 + signal.SIGKILL, told
    assert f"rank {culprit} (process " in error.splitlines()[-1], told
    notes = notes_of(tmp_path)
    assert notes.keys() == {*range(4)} - {culprit}, told
    assert {note["type"] for note in notes.values()} == {"RankFailedError"}, told
    blaming = [note for note in notes.values() if f"rank {culprit}" in note["text"]]
    # While the job starts, rank 0 hears of it and leaves, which is what others hear of.
    starting = [note for note in notes.values() if LEFT_START.search(note["text"])]
    assert blaming, told
    assert all(note in blaming or note in starting for note in notes.values()), told


@pytest.mark.parametrize("stop", range(6))
def test_a_rank_stopped_at_a_point(khvdrun, tmp_path, faults, stop, seed):
    seed = 1000 * seed + stop
    chance = random.Random(seed)
    culprit = chance.randrange(4)
    options = ("--seed", seed, "--culprit", culprit, "--steps", 200)
    stop_at = ("--stop-at", chance.randrange(POINTS // 10, POINTS))
    command = ("-np", 4, *MIXED, tmp_path, *options, *stop_at, *faulty_engine(faults))
    warn_soon = {"KERAS_HVD_STALL_WARNING_SECONDS": "0.5"}
    with khvdrun.start(*command, env=warn_soon) as job:
        seen, stopped = "", None
        while stopped is None:
            line = job.stderr.readline()
            seen += line
            assert line, f"seed {seed}: no stopped rank was named:\n{seen}"
            stopped = STOPPED.search(line)
        os.kill(int(stopped["pid"]), signal.SIGCONT)
        stdout, stderr = job.communicate(timeout=60)
    told = f"seed {seed}, {stop_at}:\n{stdout}\n{seen}{stderr}"
    assert int(stopped["rank"]) == culprit, told
    assert job.returncode == 0, told
    assert stdout.count("lost 0 wakes") == 4, told


def notes_of(records: Path) -> dict[int, dict]:
    """What each rank that raised has noted, by rank."""
    return {
        int(path.stem): json.loads(path.read_text()) for path in records.glob("*.json")
    }
