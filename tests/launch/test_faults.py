"""Random collectives under faults, against NumPy: late, killed and stopped ranks.

The faults come right before a rank writes for others, and after it reads from other
hosts, in libraries that were built for it (tf_ops/transport/faults.h; `--faults`, as in
`make soak`). With the ordinary libraries only the collectives are tested. All follows
from `--seed`, which the errors name, except the scheduling of the processes.
"""

import contextlib
import json
import math
import os
import random
import re
import selectors
import signal
import sys
from pathlib import Path

import pytest

from keras_hvd.job import cores

MIXED = (sys.executable, Path(__file__).parent / "ranks" / "mixed.py")

# The number of points at which a rank may be killed or stopped: from the first ones, in
# the rendezvous, to those of some dozens of steps.
POINTS = 5000

LEFT_START = re.compile("rank 0 ended while the job started|could not start: ")
# The stopped rank, in the words of a rank that can see it. Where a whole host does not
# answer, or data do not come, ranks can only name the rank that they wait for.
STOPPED = re.compile(r"rank (\d) \(pid \d+ on \S+\) .*its process is stopped \(kill")
SILENT = "(?:.*its process is stopped|does not answer|has not answered)"


# Ranks of each host.
HOSTS = [(4,), (2, 2), (1, 1, 1, 1)]


def started_on_hosts(start, counts, records, *options, **variables) -> list:
    """The hosts' khvdruns."""
    return [
        start(number, len(counts), "-np", count, *MIXED, records, *options, **variables)
        for number, count in enumerate(counts)
    ]


def ended(jobs) -> list[tuple[int, str, str]]:
    """The exit codes, outputs and errors of khvdruns."""
    outputs = [job.communicate(timeout=500) for job in jobs]
    return [(job.returncode, *output) for job, output in zip(jobs, outputs)]


def first_match(jobs, pattern: re.Pattern[str]) -> tuple[re.Match[str] | None, str]:
    """The first match in the jobs' standard errors, if any, and the text until then."""
    seen = dict.fromkeys(jobs, "")
    with selectors.DefaultSelector() as selector:
        for job in jobs:
            selector.register(job.stderr, selectors.EVENT_READ, job)
        while ready := selector.get_map() and selector.select(timeout=20):
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16).decode()
                seen[key.data] += chunk
                if found := pattern.search(seen[key.data]):
                    return found, "\n".join(seen.values())
                if not chunk:
                    selector.unregister(key.fileobj)
    return None, "\n".join(seen.values())


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
    for code, output, error in ended(
        started_on_hosts(start, counts, tmp_path, *options)
    ):
        assert code == 0, error
        note = cores.crowded(counts[0])
        assert error == (f"khvdrun: note: {note}\n" if note else "")
        assert output.count("lost 0 wakes") == counts[0], output
    figures.append(f"{steps} random steps on {counts} ranks were right (--seed {seed})")


@pytest.mark.parametrize(
    ("counts", "tls"), [*((counts, "0") for counts in HOSTS), ((2, 2), "1")]
)
def test_a_rank_killed_at_a_point(
    start, tmp_path, faults, point_kill, seed, counts, tls
):
    seed = 1000 * seed + point_kill
    chance = random.Random(seed)
    culprit = chance.randrange(4)
    # Each number is as likely as its half.
    point = int(math.exp(chance.uniform(0, math.log(POINTS))))
    options = ("--seed", seed, "--culprit", culprit, "--kill-at", point)
    engine = faulty_engine(faults)
    jobs = started_on_hosts(start, counts, tmp_path, *options, *engine, TLS=tls)
    ends = ended(jobs)
    told = f"seed {seed}, point {point}:\n{ends}"
    code, _, error = ends[culprit // counts[0]]
    assert code == 128 + signal.SIGKILL, told
    assert f"rank {culprit} (process " in error.splitlines()[-1], told
    notes = notes_of(tmp_path)
    assert notes.keys() == {*range(4)} - {culprit}, told
    assert {note["type"] for note in notes.values()} == {"RankFailedError"}, told
    blaming = [note for note in notes.values() if f"rank {culprit}" in note["text"]]
    # While the job starts, rank 0 hears of it and leaves; others hear of that.
    starting = [note for note in notes.values() if LEFT_START.search(note["text"])]
    assert blaming, told
    assert all(note in blaming or note in starting for note in notes.values()), told


@pytest.mark.parametrize("counts", HOSTS)
@pytest.mark.parametrize("stop", range(6))
def test_a_rank_stopped_at_a_point(start, tmp_path, faults, stop, seed, counts):
    seed = 1000 * seed + stop
    chance = random.Random(seed)
    culprit = chance.randrange(4)
    options = ("--seed", seed, "--culprit", culprit, "--steps", 200)
    stop_at = ("--stop-at", chance.randrange(POINTS // 10, POINTS))
    options = (*options, *stop_at, *faulty_engine(faults))
    # Other hosts are asked for signs of life after half of it, and have two seconds.
    warn_soon = {"STALL_WARNING_SECONDS": "0.5" if len(counts) == 1 else "6"}
    jobs = started_on_hosts(start, counts, tmp_path, *options, **warn_soon)
    with contextlib.ExitStack() as running:
        for job in jobs:
            running.enter_context(job)
        named = re.compile(rf"rank {culprit} \(pid (\d+) on \S+\) {SILENT}")
        stopped, seen = first_match(jobs, named)
        assert stopped, f"seed {seed}: the stopped rank was not named:\n{seen}"
        os.kill(int(stopped[1]), signal.SIGCONT)
        ends = ended(jobs)
    told = f"seed {seed}, {stop_at}:\n{seen}\n{ends}"
    blamed = STOPPED.findall(seen + "".join(error for _, _, error in ends))
    assert {*blamed} <= {str(culprit)}, told
    assert blamed or len(counts) > 1, told
    assert [code for code, _, _ in ends] == [0] * len(counts), told
    # A rank that it was about to ring is right to miss that after a long stop.
    about_to_ring = counts[0] - 1 if len(counts) > 1 else 0
    woken = sum(output.count("lost 0 wakes") for _, output, _ in ends)
    assert woken >= 4 - about_to_ring, told


def notes_of(records: Path) -> dict[int, dict]:
    """The notes of each rank that raised, by rank."""
    return {
        int(path.stem): json.loads(path.read_text()) for path in records.glob("*.json")
    }
