"""khvdrun --scaling: how fast a script trains on several numbers of ranks."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
LOOP = RANKS / "allreduce_loop.py"
PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()


def test_the_speed_of_a_job_and_of_its_copies_are_those_of_their_steps(
    khvdrun, tmp_path
):
    kept = tmp_path / "backup" / "of an earlier job"
    kept.parent.mkdir()
    kept.write_text("weights")
    page = tmp_path / "page.html"
    (command,) = re.findall(r"^    khvdrun (.*) python train\.py$", PAGE, re.M)
    ended = khvdrun.run(
        *command.replace("1,2,4", "2,1").replace("300", "5").split(),
        *("--report", page),
        *(sys.executable, RANKS / "scaling.py", tmp_path),
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    # SGD of a mean of squares: the gradient is twice the error, here 2 (1 + rank).
    noted = {
        each.stem: json.loads(each.read_text()) for each in tmp_path.glob("*.json")
    }
    assert noted == {
        "meet-1-0": [1 - 0.25 * 2, 1],
        "meet-2-0": [1 - 0.25 * 2, 1],
        "meet-2-1": [1 - 0.25 * 4, 2],
        "train-2-0": [1 - 0.25 * 3, 1.5],
        "train-2-1": [1 - 0.25 * 3, 1.5],
    }
    limits, head, one, two, *said = ended.stdout.splitlines()
    documented = re.search(r"^```\n(.*)\n(.*)\n", PAGE, re.M)
    assert limits == documented[1].replace("310 steps", "15 steps")
    assert head.split() == documented[2].split()
    worth, shares, advice, reducing, _ = said
    makes = r"2 ranks make ([\d.]+) times as many steps a second as one: "
    assert float(re.match(makes, worth)[1]) == pytest.approx(2 / 3, rel=0.15)
    assert shares.startswith("On 2 ranks, waiting takes ")
    assert re.match(r" +1 +\d+(\.\d)? ms .* steps/s +100 % +100 % +100 %$", one)
    # A step of two ranks takes 2 and 3 times as long as that of one.
    [reached, allowed, of_that] = map(float, re.findall(r"([\d.]+) %", two))
    assert reached == pytest.approx(100 / 3, rel=0.15)
    assert allowed == pytest.approx(100 / 2, rel=0.15)
    assert of_that == pytest.approx(100 * 2 / 3, rel=0.15)
    assert f"copies that reduce nothing reach {allowed:.3g} %" in advice
    assert "reducing gradients takes" in reducing
    text = page.read_text()
    assert "<svg" in text and "of that" in text
    # Neither a model nor a checkpoint is saved, and no backup removed or replaced.
    assert {each.name for each in tmp_path.iterdir()} == {
        *("backup", "page.html"),
        *(f"{name}.json" for name in noted),
    }
    assert kept.read_text() == "weights" and [*kept.parent.iterdir()] == [kept]


def test_a_report_and_a_measurement_of_scaling_say_the_same(khvdrun, tmp_path):
    late = 3
    script = (sys.executable, RANKS / "late.py", late)
    options = ("--report", tmp_path / "report.html")
    ended = khvdrun.run("-np", 2, *options, *script, timeout=180)
    assert ended.returncode == 0, ended.stderr
    report = (tmp_path / "report.html").read_text()
    rate = re.search(r"samples/s: median ([\d.]+)\.", report)
    waiting = re.search(r"Rank 0 waits for other ranks in ([\d.]+) % of the", report)
    options = ("--scaling", "1,2", "--scaling-steps", 20)
    ended = khvdrun.run(*options, *script, timeout=180)
    assert ended.returncode == 0, ended.stderr
    measured = re.search(
        r" ([\d.]+) samples/s .*\n"
        r"2 ranks train ([\d.]+) times as many samples a second as one: they are slower"
        r".*\nOn 2 ranks, waiting takes ([\d.]+) % of the time and moving bytes .*\n"
        r"On 2 ranks, copies that reduce nothing reach [\d.]+ %: they wait for each",
        ended.stdout,
    )
    assert measured, ended.stdout
    speed, times, share = map(float, measured.groups())
    assert float(rate[1]) == pytest.approx(speed, rel=0.2)
    # As often as rank 1 lets them, with twice the samples.
    assert times == pytest.approx(2 / late, rel=0.2)
    expected = pytest.approx(100 - 100 / late, abs=12)
    assert share == expected and float(waiting[1]) == expected


@pytest.mark.parametrize(
    "script, code, said",
    [
        ("import sys; sys.exit('no data')", 1, "2 ranks failed.*no data"),
        ("import os; os.abort()", 128 + signal.SIGABRT, "2 ranks failed.*SIGABRT"),
        ("print('done')", 1, "2 ranks ended without a step: .*DistributedOptimizer"),
    ],
)
def test_a_job_that_makes_no_step_says_why(khvdrun, script, code, said):
    ended = khvdrun.run("--scaling", "2,4", sys.executable, "-c", script)
    assert ended.returncode == code
    assert re.search(said, ended.stderr, re.DOTALL), ended.stderr
    assert "4 ranks" not in ended.stderr


def test_a_script_of_too_few_steps_is_told_so(khvdrun, tmp_path):
    # Each of its steps is of ten names.
    loop = (sys.executable, LOOP, tmp_path, "--steps", 200)
    ended = khvdrun.run("--scaling", 2, "--scaling-steps", 15, *loop)
    assert ended.returncode == 1
    assert "ended after 20 steps: 10 that do not count and 15 more" in ended.stderr
    ended = khvdrun.run("--scaling", 2, "--scaling-steps", 5, *loop)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_job_that_runs(khvdrun, tmp_path, number):
    loop = (sys.executable, LOOP, tmp_path)
    with khvdrun.start("--scaling", 2, "--scaling-steps", 10**9, *loop) as running:
        while not running.stdout.readline().startswith("ranks"):
            assert running.poll() is None
        running.send_signal(number)
        running.communicate(timeout=20)
    code = 128 + number if number == signal.SIGINT else -number
    assert running.returncode == code
    khvdrun.wait_until_gone()


@pytest.mark.parametrize(
    "option, said",
    [
        (("-np", 2), "without -np"),
        (("--nnodes", 2), "without --nnodes"),
        (("--status", 0), "without --status"),
        (("--dry-run",), "without --dry-run"),
        (("-H", "elsewhere:2"), "without -H"),
    ],
)
def test_options_of_one_job_do_not_go_with_it(khvdrun, option, said):
    ended = khvdrun.run("--scaling", "1,2", *option, "true")
    assert ended.returncode == 2 and said in ended.stderr


@pytest.mark.parametrize("numbers", ["", "0", "1,", "two", "1,-2"])
def test_numbers_of_ranks_are_whole_and_positive(khvdrun, numbers):
    ended = khvdrun.run("--scaling", numbers, "true")
    assert ended.returncode == 2 and "is not a number of processes" in ended.stderr


def test_one_rank_alone_is_compared_with_nothing(khvdrun):
    ended = khvdrun.run("--scaling", "1,1", "true")
    assert ended.returncode == 2 and "has nothing to be compared with" in ended.stderr
