"""khvdrun --min-np with a timeline, a report and a status: each job has its own."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from elastic_jobs import COUNTS, SCRIPT

from keras_hvd.report import timelines

FIT = Path(__file__).parent / "ranks" / "elastic_fit.py"

AGAIN = "--blacklist-cooldown-range", 0, 0


def test_each_job_has_a_timeline_of_its_own(khvdrun, tmp_path):
    """Rank 0 of the first one dies, and the one that is new does not write over it."""
    options = "-np", 3, "--min-np", 2, *AGAIN
    path = tmp_path / "timeline.json"
    told = "--timeline-filename", path, sys.executable, SCRIPT, tmp_path, 0, "5"
    variables = {**COUNTS, "MEMBERS": "3", "DIES_AFTER": str(path)}
    ended = khvdrun.run(*options, *told, env=variables)
    assert ended.returncode == 0, ended.stderr
    names = "timeline.json", "timeline.2.json", "timeline.3.json"
    assert sorted(tmp_path.glob("timeline*")) == sorted(tmp_path / n for n in names)
    jobs = [timelines.read([tmp_path / name]) for name in names]
    assert [job.size for job in jobs] == [3, 2, 3]
    assert jobs[-1].tensors


def test_a_timeline_that_cannot_be_written_later_does_not_end_the_job(
    khvdrun, tmp_path
):
    """As on another host, which lacks the folder."""
    folder = tmp_path / "timeline.2.json"
    folder.mkdir()
    options = "-np", 3, "--min-np", 2, "--timeline-filename", tmp_path / "timeline.json"
    program = sys.executable, SCRIPT, tmp_path, 1, "5"
    ended = khvdrun.run(*options, *program, env=COUNTS)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("this job has no timeline, or a part of one: ") == 1


def row(page, name):
    """A cell of the table in front."""
    return re.search(rf"<td>{name}</td><td>(.*?)</td>", page)[1]


def test_each_job_has_a_report_of_its_own(khvdrun, tmp_path):
    """Of two ranks, of the one that is left, and of two again."""
    options = "-np", 2, "--min-np", 1, *AGAIN, "--report", tmp_path / "report.html"
    program = sys.executable, FIT, tmp_path, 0, 3
    ended = khvdrun.run(*options, *program, timeout=150, env={"MEMBERS": "2"})
    assert ended.returncode == 0, ended.stderr
    names = "report.html", "report.2.html", "report.3.html"
    where = ", ".join(repr(str(tmp_path / name)) for name in names)
    assert f"the reports of 3 generations are in {where}\n" in ended.stderr
    assert sorted(tmp_path.glob("report*")) == sorted(tmp_path / n for n in names)
    pages = [(tmp_path / name).read_text() for name in names]
    assert [row(each, "Generation") for each in pages] == ["1 of 3", "2 of 3", "3 of 3"]
    assert [row(each, "Ranks")[0] for each in pages] == ["2", "1", "2"]
    assert [row(each, "End") for each in pages] == [
        "The job went on as generation 2.",
        "The job went on as generation 3.",
        "The job ended successfully.",
    ]
    # Of the first one, rank 0 was killed before anybody had added up its steps.
    for page in pages[1:]:
        assert "samples/s: median" in page and "loss of rank 0: median" in page
    assert "was killed by signal 9 (SIGKILL); 1 rank is left" in pages[0]
    assert all("RENEWAL" not in page for page in pages)
    assert "rank 0 is new" in pages[2] and "SIGKILL" not in pages[2]


def test_the_recordings_of_all_jobs_stay_if_khvdrun_is_killed(khvdrun, tmp_path):
    report = tmp_path / "report.html"
    options = "-np", 2, "--min-np", 1, "--report", report
    program = sys.executable, SCRIPT, tmp_path, 0, 5
    with khvdrun.start(*options, *program, env={**COUNTS, "MEMBERS": "2"}) as running:
        for line in running.stdout:
            if "1 wait to be 2" in line:
                break
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text()
        subprocess.run(["kill", "-9", children.split()[0]], check=True)
        _, said = running.communicate(timeout=60)
    (folder,) = tmp_path.glob("report.html.recording-*")
    assert f"the recording is in '{folder}': python -m keras_hvd.report " in said
    command = sys.executable, "-m", "keras_hvd.report", folder, "-o", report
    subprocess.run(command, check=True)
    assert "The job went on as generation 2." in report.read_text()
    later = (tmp_path / "report.2.html").read_text()
    assert "The job was killed, or still runs" in later


def status_of(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


def test_the_status_is_that_of_the_job_as_it_is(khvdrun, tmp_path):
    """Those that are left have other ranks than before."""
    options = "-np", 3, "--min-np", 2, "--status", 0
    program = sys.executable, SCRIPT, tmp_path, 0, 5
    with khvdrun.start(*options, *program, env={**COUNTS, "MEMBERS": "3"}) as running:
        for line in running.stderr:
            if "the job's status is at" in line:
                url = line.split()[-1]
            if "the job goes on with" in line:
                break
        state = status_of(url)
        with urllib.request.urlopen(url.replace("/status", "/metrics")) as answer:
            metrics = answer.read().decode()
        running.terminate()
        running.communicate(timeout=60)
    assert (state["size"], state["generation"]) == (2, 2)
    assert [each["rank"] for each in state["ranks"]] == [0, 1]
    assert [each["started_as"] for each in state["ranks"]] == [1, 2]
    assert {each["state"] for each in state["ranks"]} == {"running"}
    assert all(each["process"] > 1 and each["host"] for each in state["ranks"])
    assert "\nkeras_hvd_generation 2\n" in metrics
