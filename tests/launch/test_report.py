"""What khvdrun --report has the ranks record, and where it stays after kills."""

import json
import os
import pickle
import re
import signal
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from keras_hvd.report import recording
from keras_hvd.timeline.summary import Spans

RANKS = Path(__file__).parent / "ranks"
LOOP = RANKS / "allreduce_loop.py"
COPIES = "COPY_IN", "REDUCE", "COPY_OUT"


def sums_of(timeline):
    """What a timeline's own events add up to, in seconds, and its tensors' times."""
    rows, spans, requests = {}, defaultdict(Spans), {}
    for line in timeline.read_text().splitlines():
        text = line.strip().rstrip(",")
        if text in ("[", "]", ""):
            continue
        event = json.loads(text)
        if event["name"] == "thread_name":
            rows[event["tid"]] = event["args"]["name"].partition(" #")[0]
        if event["ph"] != "X":
            continue
        begin, end = event["ts"], event["ts"] + event["dur"]
        request = event["tid"], event["args"]["batch"]
        if event["name"] in COPIES:
            spans["moving"].add(begin, end)
            spans["busy"].add(begin, end)
        elif event["name"].startswith("NEGOTIATE_"):
            ready = {
                int(rank): begin + at for rank, at in event["args"]["ready"].items()
            }
            requests[request] = begin, ready[0]
            *_, before, last = sorted(ready.values())
            latest = max(ready, key=ready.get)
            spans["waited for", latest].add(before, last)
            for rank, at in ready.items():
                spans["waits", rank].add(at, last)
        elif "requests" in event["args"]:
            spans["busy"].add(requests[request][1], end)
            requests[request] += (end,)
    seconds = {key: each.covered() / 1e6 for key, each in spans.items()}
    tensors = defaultdict(float)
    for (row, _), (first, _, *end) in requests.items():
        tensors[rows[row]] += (end[0] - first) / 1e6 if end else 0
    return seconds, tensors


def test_a_recording_has_the_sums_of_the_timeline_even_if_a_rank_is_killed(
    khvdrun, tmp_path
):
    timeline, found = tmp_path / "timeline.json", tmp_path / "found"
    options = ("--timeline-filename", timeline, "--report", tmp_path / "report.html")
    command = (sys.executable, RANKS / "recorded.py", found)
    ended = khvdrun.run("-np", 2, *options, *command)
    assert "rank 1" in ended.stderr and "SIGKILL" in ended.stderr
    job, waits, losses = pickle.loads(found.read_bytes())
    seconds, tensors = sums_of(timeline)
    intervals = job.intervals
    assert job.size == 2 and job.left_out == 0

    assert intervals.moving.sum() == pytest.approx(seconds["moving"], rel=0.01)
    busy = intervals.moving.sum() + intervals.waiting.sum()
    assert busy == pytest.approx(seconds["busy"], rel=0.01)
    for rank in (0, 1):
        own = seconds["waits", rank], seconds["waited for", rank]
        assert intervals.waits[:, rank].sum() == pytest.approx(own[0], rel=0.01)
        assert intervals.waited_for[:, rank].sum() == pytest.approx(own[1], rel=0.01)
    assert len(job.tensors) > 5
    for tensor in job.tensors:
        total = tensor.negotiating + tensor.queued + tensor.running
        assert total == pytest.approx(tensors[tensor.name], rel=0.01), tensor.name
    # The one that is late, by 10 ms a step, of which there are 32.
    assert np.argmax(intervals.waited_for.sum(axis=0)) == 1
    assert intervals.waited_for[:, 1].sum() > 0.25
    assert waits.waited_for == pytest.approx([*intervals.waited_for.sum(axis=0)])
    assert np.all(intervals.begin[1:] == intervals.end[:-1])

    # Of Keras: 256 images of each rank for training, twice.
    assert np.nansum(intervals.samples) == pytest.approx(2 * 2 * 256)
    trained = ~np.isnan(intervals.loss)
    weights = intervals.samples[trained]
    mean = np.average(intervals.loss[trained], weights=weights)
    assert mean == pytest.approx(np.mean(losses), rel=1e-4)
    assert [member.rank for member in job.members] == [0, 1]
    assert all(each.process and each.cores for each in job.members)
    assert {"Python", "TensorFlow", "Keras", "keras_hvd"} <= {*job.settings}
    assert "KERAS_HVD_SECRET" not in job.settings
    assert str(found) in job.command


def test_a_recording_stays_where_khvdrun_says_if_it_is_killed(khvdrun, tmp_path):
    report = tmp_path / "report.html"
    report.write_text("of an earlier job")
    options = ("--report", report)
    environment = {"KERAS_HVD_SECRET": "do not tell", "KERAS_HVD_FUSION_BYTES": "4096"}
    command = ("-np", 2, *options, sys.executable, LOOP, tmp_path)
    with khvdrun.start(*command, env=environment) as job:
        for _ in range(2):
            job.stdout.readline()
        (folder,) = tmp_path.glob("report.html.recording-*")
        while len(recording.read(folder).intervals.steps) < 100:
            assert job.poll() is None
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)
        _, said = job.communicate(timeout=60)
    assert re.search(rf"recording is in '{folder}': python -m keras_hvd.report ", said)
    found = recording.read(folder)
    assert found.intervals.steps.sum() >= 100
    # Ten names: a step ends where the first of them comes again.
    assert sum(each.times for each in found.tensors) >= 1000
    assert found.settings["KERAS_HVD_FUSION_BYTES"] == "4096"
    assert "do not tell" not in "".join(
        path.read_bytes().decode("latin1") for path in folder.iterdir()
    )
    assert report.read_text() == "of an earlier job"


@pytest.mark.parametrize(
    "file, why",
    [("missing/report.html", "cannot write"), (".", "is a directory")],
)
def test_a_report_that_cannot_be_written_is_said_before_anything_starts(
    khvdrun, tmp_path, file, why
):
    ended = khvdrun.run("-np", 1, "--report", file, "echo", "started", cwd=tmp_path)
    assert ended.returncode == 2
    assert "--report" in ended.stderr and why in ended.stderr
    assert ended.stdout == ""
    assert os.listdir(tmp_path) == []


def test_a_job_that_never_joins_has_no_report_and_leaves_nothing(khvdrun, tmp_path):
    report = tmp_path / "report.html"
    ended = khvdrun.run("-np", 1, "--report", report, "echo", "started")
    assert ended.returncode == 0
    assert "no report: rank 0 did not come as far as keras_hvd.init()" in ended.stderr
    assert os.listdir(tmp_path) == []
