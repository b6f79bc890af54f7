"""The page of a report: its content, of known facts only."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from keras_hvd.recording.phases import PHASES
from keras_hvd.report import page
from keras_hvd.report.advice import advice
from keras_hvd.report.record import (
    WAITING,
    Event,
    Intervals,
    JobRecord,
    Member,
    Tensor,
)


def record(
    waiting=0.0, moving=0.0, waited_for=(0.0, 0.0), count=10, size=2, capacity=None
):
    """A job of `count` stretches of a second, each of 50 steps and a mebibyte."""
    ones, begin = np.ones(count), np.arange(count, dtype=float)
    by_rank = np.outer(ones, waited_for)
    waits = by_rank[:, ::-1].copy()
    waits[:, 0] = np.maximum(waits[:, 0], waiting)
    intervals = Intervals(
        begin=begin,
        end=begin + 1,
        steps=50 * ones,
        bytes=2.0**20 * ones,
        moving=moving * ones + 0.01,
        waiting=waiting * ones + 0.01,
        exposed_moving=moving * ones,
        exposed_waiting=waiting * ones,
        waits=waits,
        waited_for=by_rank,
        samples=np.full(count, 800.0),
        loss=1 / (1 + begin),
        outside=0 * ones,
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
        capacity=capacity,
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
    assert "Rank 0 waits for other ranks in 40 % of the steps' time" in text
    assert "wait for rank 1 on host1, in 38 % of it" in text


def test_a_job_that_waits_for_rank_0_is_told_so_though_rank_0_waits_for_none():
    (text,) = advice(record(waited_for=(0.38, 0.0)))
    assert text.startswith("Rank 1 waits for other ranks in 38 % of the steps' time")
    assert "Most of all the ranks wait for rank 0 on host0" in text


def test_waits_for_all_alike_blame_no_rank():
    (text,) = advice(record(waiting=0.4, waited_for=(0.2, 0.2)))
    assert "for all ranks alike" in text and "host1" not in text


def test_the_larger_share_comes_first():
    first, second = advice(record(waiting=0.2, moving=0.3))
    assert first.startswith("Moving bytes takes 30 % of the steps' time")
    assert "20 % of the steps' time" in second


# While moving 1 MiB in 0.31 s, 3.38 MB/s.
@pytest.mark.parametrize(
    ("capacity", "said"),
    [
        (3.6e6, "Meanwhile 94 % of what the links between the hosts could pass is"),
        (30e6, "Meanwhile only 11.3 % of what the links between the hosts could pass"),
        (2e6, "Meanwhile all of what the links between the hosts could pass is"),
        (6e6, "16-bit compression of the gradients (`Compression.fp16`) and auto"),
        (None, "16-bit compression of the gradients (`Compression.fp16`) and auto"),
    ],
)
def test_what_to_try_depends_on_what_the_links_could_pass(capacity, said):
    (text,) = advice(record(moving=0.3, capacity=capacity))
    assert (
        text.startswith("Moving bytes takes 30 % of the steps' time") and said in text
    )
    assert ("faster network" in text) == (capacity in (2e6, 3.6e6))
    assert ("many small tensors" in text) == (capacity == 30e6)


@pytest.mark.parametrize(
    ("remedy", "name", "value"),
    [
        ("khvdrun --autotune", "HOROVOD_AUTOTUNE", "1"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", "4"),
        ("Compression.fp16", "compression of gradients", "FP16Compressor"),
    ],
)
def test_nobody_is_advised_what_the_job_does_already(remedy, name, value):
    job = record(moving=0.3)
    assert remedy in advice(job)[0]
    job.settings[name] = value
    assert remedy not in advice(job)[0] and "larger batches" in advice(job)[0]
    job.settings[name] = "0" if value == "1" else "1" if value == "4" else "none"
    assert remedy in advice(job)[0]


def test_on_one_host_it_is_said_what_measures_whether_the_ranks_are_worth_it():
    job = record()
    assert "--scaling" not in " ".join(advice(job))
    for member in job.members:
        member.host = "one"
    *_, text = advice(job)
    assert (
        text == "`khvdrun --scaling 1,2` measures whether 2 ranks are faster than one."
    )


def test_nobody_is_advised_a_faster_network_on_one_host():
    job = record(moving=0.3, capacity=3.6e6)
    for member in job.members:
        member.host = "one"
    text, _ = advice(job)
    assert "of what the memory could pass" in text and "network" not in text


def test_what_could_pass_is_beside_what_did(tmp_path):
    job = record(0, 0.3, (0.0, 0.0, 0.0), size=3, capacity=12e6)
    text = written(job, tmp_path)
    assert "could pass 12 MB/s of tensors, for which each host sends 16 MB/s" in text
    assert "3.38 MB/s of tensors passed, and 1.05 MB/s over all of the time" in text
    assert "28.2 % and 8.74 % of it" in text
    for bar in ("could pass", "passed while moving", "passed over all"):
        assert re.search(rf"<text [^>]*>{bar}</text>", text)


def test_what_passed_is_shown_alone_if_nothing_was_measured(tmp_path):
    text = written(record(moving=0.3), tmp_path)
    assert "While rank 0 moved bytes, 3.38 MB/s" in text and "could pass" not in text


def test_one_rank_has_nothing_to_exchange(tmp_path):
    text = written(record(size=1, waited_for=(0.0,)), tmp_path)
    assert "there was nothing to exchange" in text
    assert "samples/s: median 800." in text and "loss of rank 0" in text
    assert "Time of a step" not in text and "Links and memory" not in text


def test_a_job_without_steps_has_a_page(tmp_path):
    text = written(record(count=0), tmp_path)
    assert "No whole step was recorded" in text and "<svg" not in text


def test_the_shares_of_a_step_add_up(tmp_path):
    text = written(record(waiting=0.25, moving=0.15), tmp_path)
    rows = re.findall(r"<td>(computing|waiting|moving bytes)</td><td>([\d.]+) ms", text)
    assert dict(rows) == {"computing": "12", "waiting": "5", "moving bytes": "3"}
    assert "median 800." in text


def with_validation() -> JobRecord:
    """A job of ten seconds, of which the fifth was a validation but for a step."""
    job = record(waiting=0.2, moving=0.1)
    job.intervals.outside[4] = 0.98
    job.intervals.steps[4] = 1
    job.phases = dict(zip(PHASES, (8.5, 0.25, 0.5, 0.125, 0.125, 0.0)))
    return job


def test_the_parts_of_the_time_add_up_and_only_steps_are_computing(tmp_path):
    job = with_validation()
    # A collective of keras_hvd's own after the gradients hides what went before it.
    job.intervals.exposed_waiting[:5] = 0
    assert sum(job.shares().values()) == pytest.approx(job.seconds)
    text = written(job, tmp_path)
    assert WAITING in text[: text.index("Throughput and loss")]
    for cells in (
        "steps: computing</td><td>5.794 s</td><td>57.9 %",
        "steps: waiting</td><td>1.804 s</td><td>18 %",
        "steps: moving bytes</td><td>902 ms</td><td>9.02 %",
        "which compiles</td><td>250 ms</td><td>2.5 %",
        "validation</td><td>500 ms</td><td>5 %",
        "saving</td><td>125 ms</td><td>1.25 %",
        "callbacks between epochs</td><td>125 ms</td><td>1.25 %",
        "before, between and after fits</td><td>500 ms</td><td>5 %",
    ):
        assert cells in text
    # As in the first sentence and in the table of a step.
    assert "Rank 0 waits for other ranks in 20 % of the steps&#x27; time" in text
    assert "<td>waiting</td><td>4 ms</td><td>20 %</td>" in text


def test_a_job_whose_phases_are_not_known_has_no_table_of_them(tmp_path):
    assert "Where the time went" not in written(record(), tmp_path)


def test_no_line_goes_through_a_validation(tmp_path):
    job = with_validation()
    drawn = re.findall(
        rf'<path d="([^"]*)"[^>]*stroke: {page._MOVING}', written(job, tmp_path)
    )
    # Of samples and loss: a part before it, and a part after.
    assert [len(re.findall("M", path)) for path in drawn] == [2, 2]
    job.intervals.outside[:] = 0
    drawn = re.findall(
        rf'<path d="([^"]*)"[^>]*stroke: {page._MOVING}', written(job, tmp_path)
    )
    assert [len(re.findall("M", path)) for path in drawn] == [1, 1]


def test_a_first_step_that_compiles_does_not_make_all_others_flat(tmp_path):
    job = record(count=40)
    job.intervals.steps[0] = 1
    text = written(job, tmp_path)
    assert "What takes longer, up to 1,000 ms, is cut off." in text
    assert "Drawn are means of 50 steps." in text


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


def test_steps_of_which_not_all_was_recorded_are_said_to_seem_longer(tmp_path):
    job = record(0.25, 0.15)
    said = "so steps seem longer than they were"
    assert said not in written(job, tmp_path)
    job.left_out = 12345
    text = written(job, tmp_path)
    assert "12,345 requests" in text and said in text


def test_large_numbers_are_written_out(tmp_path):
    job = record(0.25, 0.15)
    job.intervals.samples[:] = 25580
    job.events = [Event(34567.0, "warning", "late")]
    text = written(job, tmp_path)
    assert "samples/s: median 25,580." in text and "34,567 s" in text


def test_a_size_that_is_not_known_is_left_out(tmp_path):
    job = record()
    job.tensors = [Tensor("gathered", 1, 0, 1.0, 0.5, 2.0)]
    assert "<td>gathered</td><td>1</td><td></td>" in written(job, tmp_path)


def test_of_many_epochs_the_first_the_last_and_the_best_are_there(tmp_path):
    job = record()
    assert "<h2>Epochs</h2>" not in written(job, tmp_path)
    job.epochs = [
        (number, {"loss": 1 / number, "val_loss": abs(number - 58) + 0.5})
        for number in range(1, 201)
    ]
    text = written(job, tmp_path)
    assert '<th scope="col">val_loss</th>' in text
    assert "<tr><td>1</td><td>1</td><td>57.5</td></tr>" in text
    assert "<tr><td>58 (best val_loss)</td><td>0.01724</td><td>0.5</td></tr>" in text
    assert "<tr><td>200</td><td>0.005</td><td>142.5</td></tr>" in text
    epochs = text[text.index("<h2>Epochs") : text.index("<h2>Slowest")]
    assert epochs.count("<tr>") == 1 + page._MOST_EPOCHS + 1


def test_the_slowest_tensors_are_those_of_the_user(tmp_path):
    job = record()
    job.tensors = [
        Tensor("keras_hvd/metrics", 4, 64, 1.0, 1.0, 1.0),
        Tensor("keras_hvd/stop_training", 6, 24, 2.0, 1.0, 1.0),
        *(Tensor(f"gradients/{each}", 5, 40, 0.5, 0.5, 0.5) for each in range(30)),
    ]
    text = written(job, tmp_path)
    own = "<td>keras_hvd's own (2)</td><td>10</td><td></td><td>300 ms</td><td>200 ms"
    assert own in text.replace("&#x27;", "'")
    assert "keras_hvd/metrics" not in text and "keras_hvd/stop" not in text
    assert text.count("<td>gradients/") == page._MOST_TENSORS - 1


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


def test_a_picture_has_no_more_stretches_than_it_can_show(tmp_path):
    job = record(0.25, 0.15, count=2000)
    job.intervals.samples[4::8] = 1600
    text = written(job, tmp_path)
    assert "Drawn are means of 200 steps." in text
    assert text.count("<td>12 ms</td>") == 1 and "median 900." in text
    drawn = re.search(rf'<path d="([^"]*)"[^>]*stroke: {page._MOVING}', text)
    assert 500 < drawn[1].count("L") < 2 * 512


@pytest.mark.parametrize("ranks", [4, 256])
def test_the_page_of_the_longest_job_is_below_5_mb(tmp_path, ranks):
    shares = tuple(np.random.default_rng(1).random(ranks))
    text = written(record(0.1, 0.1, shares, count=2048, size=ranks), tmp_path)
    assert len(text) < 5e6


# Heads of rows and columns that take more than a line and are no names.
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
