"""The recordings of ranks under khvdrun --report, and their place after kills."""

import contextlib
import dataclasses
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from pathlib import Path

import network
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from keras_hvd.launch.output import Tail
from keras_hvd.launch.status import metrics
from keras_hvd.report import recording, timelines
from keras_hvd.timeline.summary import Spans

RANKS = Path(__file__).parent / "ranks"
LOOP = RANKS / "allreduce_loop.py"
COPIES = "COPY_IN", "REDUCE", "COPY_OUT"


def sums_of(timeline):
    """The sums of a timeline's own events, in seconds, and its tensors' times."""
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


def check_report_of(timeline, recorded):
    """The report from a timeline has the same figures as the recording."""
    job = timelines.read([timeline])
    assert (job.size, job.left_out) == (recorded.size, 0)
    assert job.begin == pytest.approx(recorded.begin, abs=2)
    assert job.seconds == pytest.approx(recorded.seconds, abs=0.5)
    for name, sums in vars(recorded.intervals).items():
        if name in ("samples", "loss", "outside"):
            continue
        own = getattr(job.intervals, name).sum(axis=0)
        # The last event of a rank that dies may be in one of them only.
        assert own == pytest.approx(sums.sum(axis=0), rel=0.01, abs=1e-4), name
    found = {each.name: each for each in job.tensors}
    for tensor in recorded.tensors:
        own = dataclasses.astuple(found[tensor.name])[1:]
        assert own == pytest.approx(dataclasses.astuple(tensor)[1:], rel=0.01)
    stalls = [each.text for each in job.events if each.kind == "stall"]
    told = [each.text for each in recorded.events if each.kind == "stall"]
    assert stalls == [re.sub(r" \(pid \d+ on [^)]*\)", "", each) for each in told]


def get(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.headers.get_content_type(), answer.read().decode()


def answer_to(url, host):
    """The status line of the answer to a request with this Host header."""
    address = urllib.parse.urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        header = "" if host is None else f"Host: {host}\r\n"
        connection.sendall(f"GET /status HTTP/1.0\r\n{header}\r\n".encode())
        return connection.makefile().readline().split()[1]


def check_hosts(url):
    """A web page whose name is made to lead to this host must not read the status."""
    for host in (None, "127.0.0.1", "localhost", "LOCALHOST:80", "127.0.0.1:9"):
        assert answer_to(url, host) == "200", host
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.", "", "[::1]"):
        assert answer_to(url, host) == "421", host


def check_status(url):
    """The status of a job whose rank 1 is late, and waits after its training."""
    kind, text = get(url)
    assert kind == "application/json"
    state = json.loads(text)
    # Rank 1 may be about to end its last epoch.
    deadline = time.monotonic() + 20
    while state["ranks"][1]["step"] < 32 and time.monotonic() < deadline:
        state = json.loads(get(url)[1])
    assert state["size"] == 2
    for number, rank in enumerate(state["ranks"]):
        assert rank["rank"] == number and rank["state"] == "running"
        assert rank["host"] and rank["process"] > 1
        assert rank["step"] == 32 and rank["epoch"] == 2 and rank["samples"] == 512
        assert rank["samples_per_second"] > 0 and 0 < rank["loss"] < 3
        assert 0 <= rank["last_step_age_seconds"] < 60
        assert "KeyError" not in rank["last_error"]
    # All but the last step are known half a second later.
    deadline = time.monotonic() + 20
    while state["ranks"][1]["waited_for_seconds"] < 0.4 and time.monotonic() < deadline:
        state = json.loads(get(url)[1])
    first, late = state["ranks"]
    assert late["waited_for_seconds"] > 0.4 and first["waited_seconds"] > 0.4

    kind, text = get(url.replace("/status", "/metrics"))
    assert kind == "text/plain"
    families = {each.name: each for each in text_string_to_metric_families(text)}
    assert families["keras_hvd_steps"].type == "counter"
    for sample in families["keras_hvd_steps"].samples:
        assert sample.value == 32 and {*sample.labels} == {"rank", "host"}
    loss = {
        each.labels["rank"]: each.value for each in families["keras_hvd_loss"].samples
    }
    assert loss == {"0": first["loss"], "1": late["loss"]}
    page = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
    (documented,) = re.findall(r"^```text\n(# HELP .*?)^```$", page, re.M | re.S)
    of_no_host = [re.sub(r'host=".*"} \S+', "", each) for each in (documented, text)]
    assert {*of_no_host[0].splitlines()} <= {*of_no_host[1].splitlines()}


def trouble(url):
    """Connections that send nothing, or anything, or too much; some are left open."""
    address = urllib.parse.urlsplit(url)
    opened = []
    parts = b"", b"GET", b"\0\xff\r\n\r\n", b"GET /status HTTP/1.1\r\n", b"x" * 70000
    for sent in parts:
        for _ in range(10):
            connection = socket.create_connection((address.hostname, address.port))
            opened.append(connection)
            with contextlib.suppress(ConnectionError):
                connection.sendall(sent)
    return opened


def check_phases(job, least):
    """What took the time of a training: `least` of its steps, and 0.25 s an epoch."""
    assert [number for number, _ in job.epochs] == [1, 2]
    phases = job.phases
    assert least < phases["steps"] < job.seconds
    assert min(phases["tracing"], phases["validation"], phases["saving"]) > 0.01
    assert 0.5 < phases["callbacks"] < 10
    assert sum(job.shares().values()) == pytest.approx(job.seconds)
    # They lie between the steps.
    assert job.intervals.inside.sum() == pytest.approx(phases["steps"], rel=0.2)


def test_a_recording_has_the_sums_of_the_timeline_and_status_says_how_far_ranks_are(
    khvdrun, tmp_path
):
    timeline, found = tmp_path / "timeline.json", tmp_path / "found"
    options = ("--timeline-filename", timeline, "--report", tmp_path / "report.html")
    command = (sys.executable, RANKS / "recorded.py", found)
    with khvdrun.start(
        "-np", 2, *options, "--status", 0, *command, stdin=subprocess.PIPE
    ) as running:
        said = running.stderr.readline()
        assert said.startswith("khvdrun: the job's status is at http://127.0.0.1:")
        url = said.split()[-1]
        shown = ""
        while not shown.endswith("trained\n"):
            assert running.poll() is None
            shown += running.stdout.readline()
        check_status(url)
        with contextlib.ExitStack() as opened:
            for connection in trouble(url):
                opened.enter_context(connection)
            _, stderr = running.communicate("go\n", timeout=60)
    bars = re.findall(r"16/16 .*step - [\d,]+ samples/s.* - loss: ", shown)
    assert len(bars) == 2 and re.search(r"\d% waiting, most for rank [01] - ", bars[1])
    assert "the report is in" in stderr
    page = (tmp_path / "report.html").read_text()
    assert "wait for rank 1 on" in page and "samples/s" in page and "SIGKILL" in page
    assert "The memory could pass" in page
    assert not [*tmp_path.glob("report.html.recording-*")]
    # The job neither waits for the process that asks, nor mentions it.
    assert "rank 1" in stderr and "SIGKILL" in stderr
    assert "status.py" not in stderr
    job, waits, history = pickle.loads(found.read_bytes())
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
    # Measured by allreduces that are not among the job's own.
    assert 10e6 < job.capacity < 1e12
    assert len(job.tensors) > 5
    for tensor in job.tensors:
        total = tensor.negotiating + tensor.queued + tensor.running
        assert total == pytest.approx(tensors[tensor.name], rel=0.01), tensor.name
    check_report_of(timeline, job)
    assert waits.waited_for == pytest.approx([*intervals.waited_for.sum(axis=0)])
    assert np.all(intervals.begin[1:] == intervals.end[:-1])

    # The progress bar's other values are in no log.
    assert {*history} == {"loss", "val_loss"}
    # Of Keras: 256 images of each rank for training, twice.
    assert np.nansum(intervals.samples) == pytest.approx(2 * 2 * 256)
    trained = ~np.isnan(intervals.loss)
    # By 100 ms in each of 32 steps; the last rank of the others changes.
    of_steps = intervals.waited_for[trained]
    assert np.median(of_steps[:, 1]) > 0.05 > np.median(of_steps[:, 0])
    weights = intervals.samples[trained]
    mean = np.average(intervals.loss[trained], weights=weights)
    assert mean == pytest.approx(np.mean(history["loss"]), rel=1e-4)
    # Rank 1 comes late in all of the 32 steps; the first one is another phase.
    check_phases(job, least=3)
    losses = [logs["val_loss"] for _, logs in job.epochs]
    assert losses == pytest.approx(history["val_loss"])
    shares = job.shares()
    assert shares["steps: waiting"] > 2
    assert job.settings["compression of gradients"] == "none"
    assert [member.rank for member in job.members] == [0, 1]
    assert all(each.process and each.cores for each in job.members)
    assert {"Python", "TensorFlow", "Keras", "keras_hvd"} <= {*job.settings}
    assert "KERAS_HVD_SECRET" not in job.settings
    assert str(found) in job.command


def test_one_rank_has_a_report_and_a_status_too(khvdrun, tmp_path):
    found, report = tmp_path / "found", tmp_path / "report.html"
    options = ("-np", 1, "--report", report, "--status", 0)
    command = (sys.executable, RANKS / "recorded.py", found)
    with khvdrun.start(*options, *command, stdin=subprocess.PIPE) as running:
        url = running.stderr.readline().split()[-1]
        for line in iter(running.stdout.readline, ""):
            if line.endswith("trained\n"):
                break
        (rank,) = json.loads(get(url)[1])["ranks"]
        check_hosts(url)
        running.communicate("go\n", timeout=60)
    assert running.returncode == 0
    assert rank["step"] == 32 and rank["samples"] == 512 and rank["epoch"] == 2
    assert rank["samples_per_second"] > 0 and 0 < rank["loss"] < 3
    page = report.read_text()
    assert "there was nothing to exchange" in page and "32 steps" in page
    assert "samples/s: median" in page and "loss of rank 0: median" in page
    job, _, history = pickle.loads(found.read_bytes())
    assert job.capacity is None
    assert job.intervals.steps.sum() == 32
    check_phases(job, least=0)
    assert np.nansum(job.intervals.samples) == 512
    trained = job.intervals.steps > 0
    loss, samples = job.intervals.loss[trained], job.intervals.samples[trained]
    mean = np.average(loss, weights=samples)
    assert mean == pytest.approx(np.mean(history["loss"]), rel=1e-4)


MEBIBYTES = """
import ctypes
from allreduce_loop import SUM, reduce_in_place
import keras_hvd
keras_hvd.init()
values = (ctypes.c_int32 * (1 << 18))()
for _ in range(40):  # A pause of one of them must not count for much.
    reduce_in_place("a", values, SUM)
"""


@pytest.mark.skipif(bool(network.unavailable()), reason=network.unavailable())
def test_a_report_says_what_the_links_could_pass_and_did(
    khvdrun, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(RANKS), *sys.path]))
    monkeypatch.setenv("KERAS_HVD_SECRET", "a secret of this test")
    report = tmp_path / "report.html"
    with network.connected(2, "100mbit") as hosts:
        meeting = ("--nnodes", 2, "--rendezvous", f"{hosts[0].address}:29400")
        command = ("-np", 1, sys.executable, "-c", MEBIBYTES)
        # Only the host of rank 0 is told of the report.
        first, second = (
            khvdrun.start(*meeting, "--node-rank", number, *told, *command, on=host)
            for number, (told, host) in enumerate(
                zip([("--report", report), ()], hosts, strict=True)
            )
        )
        for job in first, second:
            with job:
                _, said = job.communicate(timeout=60)
                assert job.returncode == 0, said
    page = report.read_text()
    could, sends, passed = (
        float(re.search(rf"{what} ([\d.]+) MB/s", page)[1])
        for what in ("could pass", "each host sends", "moved bytes,")
    )
    # 12.5 MB/s with the headers of packets; after a rest 128 kB pass at once.
    assert 9 < could < 14 and sends == could
    assert 9 < passed < 14
    # And not the wait for other ranks.
    assert "<h1>What the job did</h1><p>Moving bytes takes" in page
    assert "of what the links between the hosts could pass is used" in page


def test_a_report_counts_hosts_and_not_their_names(start, tmp_path):
    """As of virtual machines that are copies, or of one machine that plays both."""
    report = tmp_path / "report.html"
    command = ("-np", 1, sys.executable, "-c", "import keras_hvd; keras_hvd.init()")
    jobs = [start(n, 2, "--report", report, *command) for n in range(2)]
    for job in jobs:
        _, said = job.communicate(timeout=60)
        assert job.returncode == 0, said
    page = report.read_text()
    assert "<td>2 on 2 hosts</td>" in page
    assert f"<td>{socket.gethostname()} (2)</td>" in page


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
    command = [sys.executable, "-m", "keras_hvd.report", folder, "-o", report]
    subprocess.run(command, check=True)
    assert "The job was killed, or still runs" in report.read_text()
    # A file that a disk or a copy has cut off is named in one line.
    for name, length in {"ranks": 300, "times": 6000}.items():
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:length])
        ended = subprocess.run(command, capture_output=True, text=True)
        (folder / name).write_bytes(whole)
        assert ended.returncode == 1, name
        assert re.search(rf"the recording '{folder}' is damaged \(", ended.stderr)
        assert ended.stderr.count("\n") == 1, ended.stderr


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


def test_a_port_that_is_taken_is_said_before_anything_starts(khvdrun, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = khvdrun.run("-np", 1, "--status", port, "echo", "started")
    assert ended.returncode == 2 and ended.stdout == ""
    assert f"--status: port {port} is taken" in ended.stderr


def test_metrics_can_be_read_whatever_a_host_or_an_error_is_called():
    text = 'a "b" \\ c\nd'
    rank = {"rank": 3, "host": text, "state": "running", "last_error": text}
    read = text_string_to_metric_families(metrics({"size": 4, "ranks": [rank]}))
    families = {each.name: each for each in read}
    (sample,) = families["keras_hvd_last_error_info"].samples
    assert sample.labels == {"rank": "3", "host": text, "error": text}
    assert families["keras_hvd_running"].samples[0].value == 1


def test_the_first_warnings_of_each_rank_are_kept_for_the_report():
    tail = Tail(2)
    for number in range(30):
        tail.feed(b"noise\nkeras_hvd [rank 1] warn")
        tail.feed(b"ing: number %d\nkeras_hvd [rank 1] info: no\n" % number)
    texts = [text for _, text in tail.warnings]
    assert texts == [f"keras_hvd [rank 1] warning: number {n}" for n in range(20)]


def test_a_job_that_never_joins_has_no_report_and_leaves_nothing(khvdrun, tmp_path):
    report = tmp_path / "report.html"
    ended = khvdrun.run("-np", 1, "--report", report, "echo", "started")
    assert ended.returncode == 0
    assert "no report: rank 0 did not come as far as keras_hvd.init()" in ended.stderr
    assert os.listdir(tmp_path) == []


def test_a_report_that_cannot_be_written_in_time_is_given_up_at_a_signal(
    khvdrun, tmp_path
):
    report = tmp_path / "report.html"
    # A pipe without a reader: khvdrun waits when it opens it.
    os.mkfifo(report)
    command = (sys.executable, "-c", "import keras_hvd; keras_hvd.init()")
    options = ("-np", 1, "--verbose", "--report", report)
    with khvdrun.start(*options, *command) as job:
        while not job.stderr.readline().endswith("rank 0 ended with exit code 0\n"):
            assert job.poll() is None
        deadline = time.monotonic() + 30
        # Until it writes, signals are for ranks, of which there is none.
        while job.poll() is None and time.monotonic() < deadline:
            job.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(0.2)
        said = job.stderr.read()
    assert job.returncode == 0
    assert "no report: a signal came while it was written" in said
    (folder,) = tmp_path.glob("report.html.recording-*")
    assert f"the recording is in '{folder}': python -m keras_hvd.report" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
@pytest.mark.parametrize(
    "room, missing", [(0, "the job cannot be recorded"), (100, "has no recording")]
)
def test_a_job_goes_on_where_the_disk_of_what_is_written_of_it_is_full(
    khvdrun, tmp_path, room, missing
):
    fill = f"head -c {(128 - room) << 10} /dev/zero > {tmp_path}/other"
    mount = f'mount -t tmpfs -o size=128k tmpfs {tmp_path} && {fill}; exec "$@"'
    options = ("--report", tmp_path / "report.html", "--output-filename", tmp_path)
    told = ("--timeline-filename", tmp_path / "timeline.json", *options)
    started = (sys.executable, "-m", "keras_hvd.launch", "-np", 2, *told)
    program = "import keras_hvd; keras_hvd.init(); print('y' * 200_000)"
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", *started]
    command = [*map(str, command), sys.executable, "-c", program]
    marked = {**os.environ, "KERAS_HVD_TEST_MARK": khvdrun.mark}
    ended = subprocess.run(
        command, env=marked, capture_output=True, text=True, timeout=60
    )
    if "unshare" in ended.stderr:
        pytest.skip(ended.stderr)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("yy") == 200_000
    assert ended.stderr.count(missing) == 1, ended.stderr
    assert ended.stdout.count("stdout is cut off here: No space left") == 2
    assert "Traceback" not in ended.stderr
