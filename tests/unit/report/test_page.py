"""The page of a report: what it says, and that it says only what is known."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from keras_hvd.report import page
from keras_hvd.report.advice import advice
from keras_hvd.report.record import Event, Intervals, JobRecord, Member, Tensor


def record(waiting=0.0, moving=0.0, waited_for=(0.0, 0.0), count=10, size=2):
    """A job of `count` stretches of a second, each of 50 steps."""
    ones, begin = np.ones(count), np.arange(count, dtype=float)
    by_rank = np.outer(ones, waited_for)
    intervals = Intervals(
        begin=begin,
        end=begin + 1,
        steps=50 * ones,
        bytes=2.0**20 * ones,
        moving=moving * ones + 0.01,
        waiting=waiting * ones + 0.01,
        exposed_moving=moving * ones,
        exposed_waiting=waiting * ones,
        waits=by_rank[:, ::-1],
        waited_for=by_rank,
        samples=np.full(count, 800.0),
        loss=1 / (1 + begin),
    )
    return JobRecord(
        size=size,
        begin=1.7e9,
        seconds=count,
        intervals=intervals,
        tensors=[Tensor("<script>alert(1)</script>", 500, 500 << 20, 1.0, 0.5, 2.0)],
        events=[Event(3.0, "warning", "a & b")],
        members=[Member(rank, f"host{rank}") for rank in range(size)],
        settings={"Keras": "3.15"},
        command="python train.py",
        ended="ended well",
    )


def written(job: JobRecord, tmp_path) -> str:
    file = tmp_path / "report.html"
    page.write(job, str(file))
    return file.read_text()


def test_a_job_that_only_computes_is_told_so():
    (text,) = advice(record(waiting=0.01, moving=0.01))
    assert text.startswith("98 % of a step is computation")


def test_the_rank_that_others_wait_for_is_named_with_its_host():
    (text,) = advice(record(waiting=0.4, waited_for=(0.02, 0.38)))
    assert "waits for other ranks in 40 % of the time" in text
    assert "wait for rank 1 on host1: 3.8 s, 38 % of the time" in text


def test_waits_for_all_alike_blame_no_rank():
    (text,) = advice(record(waiting=0.4, waited_for=(0.2, 0.2)))
    assert "for all ranks alike" in text and "host1" not in text


def test_the_larger_share_comes_first():
    first, second = advice(record(waiting=0.2, moving=0.3))
    assert first.startswith("Moving bytes takes 30 % of the time")
    assert "20 % of the time" in second


def test_a_job_without_steps_has_a_page(tmp_path):
    text = written(record(count=0), tmp_path)
    assert "No whole step was recorded" in text and "<svg" not in text


def test_the_shares_of_a_step_add_up(tmp_path):
    text = written(record(waiting=0.25, moving=0.15), tmp_path)
    rows = re.findall(r"<td>(computing|waiting|moving bytes)</td><td>([\d.]+) ms", text)
    assert dict(rows) == {"computing": "12", "waiting": "5", "moving bytes": "3"}
    assert "median 800." in text


def test_a_first_step_that_compiles_does_not_make_all_others_flat(tmp_path):
    job = record(count=40)
    job.intervals.steps[0] = 1
    text = written(job, tmp_path)
    assert "The longest steps, of up to 1,000 ms, are cut off." in text


def test_a_stretch_is_as_long_as_it_took_and_nothing_lies_between_two(tmp_path):
    job = record(count=3)
    job.intervals.end[0] = job.intervals.begin[1] = 1.9
    job.intervals.samples[:] = 800, 400, 900
    text = written(job, tmp_path)
    drawn = re.search(rf'<path d="([^"]*)"[^>]*stroke: {page._MOVING}', text)
    points = [
        tuple(map(float, each.split())) for each in re.split("[ML]", drawn[1])[1:]
    ]
    steps = [np.subtract(after, point) for point, after in zip(points, points[1:])]
    # Flat for as long as the stretch took, then straight to the next one.
    assert all(0 in step for step in steps)
    lengths = [step[0] for step in steps if step[0] > 0]
    assert np.divide(lengths, lengths[2]) == pytest.approx([1.9, 0.1, 1], rel=0.01)


def test_a_size_that_is_not_known_is_left_out(tmp_path):
    job = record()
    job.tensors = [Tensor("gathered", 1, 0, 1.0, 0.5, 2.0)]
    assert "<td>gathered</td><td>1</td><td></td>" in written(job, tmp_path)


def test_names_are_no_markup_and_the_page_asks_for_nothing_elsewhere(tmp_path):
    text = written(record(), tmp_path)
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text
    assert "a &amp; b" in text
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", text)
    for picture in re.findall(r"<svg .*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(picture)
        assert "currentColor" in picture and page._TEXT not in picture


def test_what_is_not_known_is_left_out(tmp_path):
    job = record(size=1, waited_for=(0.0,))
    job.intervals.samples[:] = job.intervals.loss[:] = np.nan
    text = written(job, tmp_path)
    assert not re.search(r"\bnan\b", text)
    assert "Throughput" not in text and "Who waited" not in text
    assert "None" not in text


@pytest.mark.parametrize("ranks", [4, 256])
def test_the_page_of_the_longest_job_is_below_5_mb(tmp_path, ranks):
    shares = tuple(np.random.default_rng(1).random(ranks))
    text = written(record(0.1, 0.1, shares, count=2048, size=ranks), tmp_path)
    assert len(text) < 5e6


# What heads a row or a column and takes more than a line, of those that are no names.
_BROKEN = """
[...document.querySelectorAll("th, td:first-child")].filter(cell => {
  const range = document.createRange()
  range.selectNodeContents(cell)
  return !cell.closest(".tensors tbody") && range.getClientRects().length > 1
}).map(cell => cell.textContent)
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_it_in_a_browser(browser, tmp_path, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    job = record(0.2, 0.1, (0.1, 0.5))
    job.command = 40 * "python train.py "
    written(job, tmp_path)
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": 390, "height": 844}
    )
    page, complaints, requests = context.new_page(), [], []
    page.on("console", lambda each: complaints.append(each.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    address = (tmp_path / "report.html").as_uri()
    page.goto(address)
    found = axe.run(page).response
    width = page.evaluate("document.documentElement.scrollWidth")
    broken = page.evaluate(_BROKEN)
    context.close()
    assert broken == []
    assert complaints == [] and width == 390
    assert [each for each in requests if not each.startswith("data:")] == [address]
    assert [each["id"] for each in found["violations"]] == []
    assert "color-contrast" in [each["id"] for each in found["passes"]]


def test_what_is_no_recording_is_said_in_a_line_and_tensorflow_is_not_needed(tmp_path):
    code = (
        "import runpy, sys\n"
        "sys.argv = ['report', sys.argv[1]]\n"
        "try: runpy.run_module('keras_hvd.report', run_name='__main__')\n"
        "finally: assert 'tensorflow' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.endswith("is no recording of keras_hvd")
