"""The pages of a job's generations: their names, and what each of them tells."""

import pytest

from keras_hvd.recording import files
from keras_hvd.report import generations, page, recording
from keras_hvd.report.generations import Generations
from keras_hvd.report.record import JobRecord


@pytest.fixture
def written(monkeypatch):
    """The records that are written, by the names of their pages."""
    found = {}
    monkeypatch.setattr(page, "write", lambda job, path: found.update({path: job}))
    return found


def record(begin):
    return JobRecord(2, begin, 1.0, None, [], [], [], {}, "", "was killed")


def test_the_only_one_is_the_report(written):
    job = Generations({1: record(100.0)}, 1)
    job.end("ended successfully", [(101.0, "end", "the job ended successfully")])
    assert job.write("report.html") == "the report is in 'report.html'"
    (only,) = written.values()
    assert (only.generation, only.ended) == ("", "ended successfully")
    assert [each.time for each in only.events] == [1.0]


def test_each_tells_what_happened_while_it_was_there(written):
    job = Generations({1: record(100.0), 2: record(110.0), 4: record(130.0)}, 4)
    said = (109.0, "one dies"), (111.0, "early"), (125.0, "later"), (90.0, "before")
    job.end("failed", [(at, "change", text) for at, text in said])
    assert job.write("a.html") == (
        "the reports of 4 generations are in 'a.html', 'a.2.html', 'a.4.html'; there "
        "is none of 3, where rank 0 was on another host, or ended too early"
    )
    texts = [[event.text for event in each.events] for each in written.values()]
    assert texts == [["before", "one dies"], ["early", "later"], []]
    assert [(each.generation, each.ended) for each in written.values()] == [
        ("1 of 4", "went on as generation 2"),
        ("2 of 4", "went on as generation 3"),
        ("4 of 4", "failed"),
    ]


def test_the_end_of_one_without_a_record_is_no_others(written):
    job = Generations({1: record(100.0)}, 2)
    job.end("failed", [])
    job.write("a.html")
    assert written["a.html"].ended == "went on as generation 2"


def test_many_are_not_all_named(written):
    job = Generations({number: record(100.0) for number in range(1, 8)}, 7)
    assert job.write("a.html").endswith(
        "are in 'a.html', 'a.2.html' and so on to 'a.7.html'"
    )


def test_a_job_that_was_called_off_is_no_generation(tmp_path, written, monkeypatch):
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / files.GENERATION).write_text("2")
    begins = {tmp_path: 100.0, tmp_path / "1": 101.0, tmp_path / "2": 102.0}
    monkeypatch.setattr(recording, "read", lambda folder: record(begins[folder]))
    generations.read(tmp_path).write("a.html")
    assert {path: job.begin for path, job in written.items()} == {
        "a.html": 100.0,
        "a.2.html": 102.0,
    }
