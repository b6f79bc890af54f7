"""Timelines that khvdrun has written: of jobs that end well, and of others."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import network
import pytest

TESTS = Path(__file__).parent.parent
RANKS = str(TESTS / "launch" / "ranks")
LOOP = Path(RANKS) / "allreduce_loop.py"


def lines(path):
    return [line.strip().rstrip(",").rstrip() for line in path.open()]


def test_a_job_that_ends_well_leaves_valid_json(khvdrun, tmp_path):
    path = tmp_path / "timeline.json"
    # What rank 1 submits before rank 0 begins to record is not in it.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    options = ("--timeline-filename", path, "--timeline-mark-cycles")
    command = (sys.executable, LOOP, tmp_path, "--steps", 30, "--after-rank-0", pipe)
    ended = khvdrun.run("-np", 2, *options, *command)
    assert ended.returncode == 0, ended.stderr
    events = json.loads(path.read_text())
    names = [event["name"] for event in events]
    assert names.count("thread_name") == 10
    assert names.count("SHARED_MEMORY_ALLREDUCE") == 30
    assert names.count("CYCLE_START") == 30


@pytest.mark.parametrize("variable", ["KERAS_HVD_TIMELINE", "HOROVOD_TIMELINE"])
def test_a_variable_asks_for_it_as_well(khvdrun, tmp_path, variable):
    path = tmp_path / "timeline.json"
    command = (sys.executable, LOOP, tmp_path, "--steps", 3)
    ended = khvdrun.run("-np", 1, *command, env={variable: str(path)})
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(path.read_text())) > 10


def test_horovods_word_for_starting_it_later_is_no_file(khvdrun, tmp_path):
    command = (sys.executable, LOOP, tmp_path, "--steps", 3)
    environment = {"HOROVOD_TIMELINE": "DYNAMIC"}
    ended = khvdrun.run("-np", 1, *command, env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert os.listdir(tmp_path) == []


def test_the_file_of_a_killed_job_is_whole_up_to_its_last_event(khvdrun, tmp_path):
    path = tmp_path / "timeline.json"
    options = ("--timeline-filename", path)
    with khvdrun.start("-np", 2, *options, sys.executable, LOOP, tmp_path) as job:
        ranks = [int(job.stdout.readline().split()[-1]) for _ in range(2)]
        # So much that it has been written in many parts.
        while path.stat().st_size < 1 << 20:
            assert job.poll() is None
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        job.communicate(timeout=60)
    first, *events = lines(path)
    assert first == "["
    assert len([json.loads(event) for event in events if event]) > 1000
    # The viewers take it as it is; only the bracket is missing.
    json.loads(path.read_text() + "]")
    command = (sys.executable, "-m", "keras_hvd.timeline", path)
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks; the file ends early" in ended.stdout
    assert "the others waited most for rank" in ended.stdout
    assert "SHARED_MEMORY_ALLREDUCE" in ended.stdout


def test_a_file_that_cannot_be_written_is_said_before_anything_starts(
    khvdrun, tmp_path
):
    for path, reason in (
        (tmp_path, "is a directory"),
        (tmp_path / "missing" / "file", "cannot write"),
    ):
        ended = khvdrun.run("-np", 1, "--timeline-filename", path, "true")
        assert ended.returncode == 2
        assert "--timeline-filename" in ended.stderr and reason in ended.stderr


def test_a_variable_with_a_wrong_name_ends_the_job(khvdrun, tmp_path):
    environment = {"KERAS_HVD_TIMELINE": str(tmp_path / "missing" / "file")}
    command = (sys.executable, LOOP, tmp_path, "--steps", 3)
    ended = khvdrun.run("-np", 2, *command, env=environment)
    assert ended.returncode == 1
    assert "missing/file' cannot be written: No such file or directory" in ended.stderr


SUBMIT = """
import json, sys, time
from allreduce_loop import allreduce
import keras_hvd
keras_hvd.init()
keras_hvd.start_timeline(sys.argv[1])
# What a rank submits before rank 0 has started it is not recorded.
keras_hvd.allgather_object("started")
submitted = []
for step in range(60):
    submitted.append(time.monotonic())
    allreduce(f"tensor {step}", 1)
keras_hvd.stop_timeline()
print(json.dumps([keras_hvd.rank(), submitted]), flush=True)
"""


# The seconds that rank 1's host seems to be up longer, where the kernel can do that.
AHEAD = 86400 if os.path.exists("/proc/self/timens_offsets") else 0
# Runs a command with that clock on rank 1, and as it is elsewhere.
ON_CLOCKS = f"""
[ $KERAS_HVD_RANK = 1 ] && [ {AHEAD} != 0 ] || exec "$@"
exec unshare --fork --time --monotonic {AHEAD} --boottime {AHEAD} "$@"
"""


@pytest.mark.skipif(bool(network.unavailable()), reason=network.unavailable())
def test_other_hosts_times_are_on_rank_0s_clock(tmp_path, monkeypatch):
    """A message travels for 2 ms, which does not count, and rank 1 is a day ahead."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([RANKS, *sys.path]))
    path = tmp_path / "timeline.json"
    on_hosts = [sys.executable, str(TESTS / "on_hosts.py"), "--delay", "2", "1", "1"]
    on_clocks = ["sh", "-c", ON_CLOCKS, "sh"]
    command = [*on_hosts, *on_clocks, sys.executable, "-c", SUBMIT, str(path)]
    printed = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=60
    ).stdout
    submitted = dict(json.loads(found) for found in re.findall(r"\[\d, .*\]", printed))
    assert submitted[1][0] - submitted[0][0] == pytest.approx(AHEAD, abs=30)
    events = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    errors = []
    for event in events:
        if event["name"] != "NEGOTIATE_ALLREDUCE":
            continue
        ready = event["args"]["ready"]
        step = int(names[event["tid"]].split()[-1])
        later = ready["1"] - ready["0"]
        really = submitted[1][step] - AHEAD - submitted[0][step]
        errors.append(later - 1e6 * really)
    assert len(errors) > 40
    assert abs(statistics.median(errors)) < 500, errors
    # Host 1 has a row. It hears of each decision after 2 ms, and then carries it out.
    decided = {
        names[event["tid"]]: event["ts"] + event["dur"]
        for event in events
        if event["name"] == "NEGOTIATE_ALLREDUCE"
    }
    elsewhere = [e for e in events if e["pid"] == 2 and e["name"] == "ALLREDUCE"]
    (row,) = {names[event["tid"]] for event in elsewhere}
    assert row.startswith("rank 1 (pid ")
    later = [e["ts"] - decided[e["args"]["tensors"]] for e in elsewhere]
    assert len(later) > 40
    # A busy machine only makes it later.
    assert 1500 < sorted(later)[len(later) // 10] < 3000, later
    summary = subprocess.run(
        [sys.executable, "-m", "keras_hvd.timeline", str(path)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert "rank 1 (pid" not in summary
