"""The scripts and commands of these pages do what the pages say."""

from __future__ import annotations

import difflib
import pathlib
import re
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
# page: its commands
PAGES = {
    "index": [
        # In tests/wheel, where the wheel is.
        'pip install --find-links dist "keras_hvd[tensorflow-cpu]" scikit-learn',
        "khvdrun --check-build",
        "python plain.py",
        "khvdrun -np 4 python train.py",
    ],
    "saving": ["khvdrun -np 2 python resume.py"],
    "hangs": [
        "khvdrun -np 2 --stall-check-warning-time-seconds 5 "
        "--stall-check-shutdown-time-seconds 10 python hangs.py",
        "kill -USR1 4711",
        # In test_diagnose.py.
        "khvdrun --diagnose -np 2",
    ],
    "from_tf_distribute": ["khvdrun -np 2 python train.py"],
}
CHECK_BUILD, PLAIN, TRAIN = PAGES["index"][1:]


def text(page: str) -> str:
    return (DOCS / f"{page}.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(page), re.M | re.S)


def scripts(page: str) -> dict[str, str]:
    """The page's scripts by their names."""
    named = r'^```python title="([\w.]+)".*?\n(.*?)^```$'
    return dict(re.findall(named, text(page), re.M | re.S))


@pytest.fixture
def folder(tmp_path, request):
    """A folder with the scripts of a page."""
    for name, content in scripts(request.param).items():
        (tmp_path / name).write_text(content)
    return tmp_path


def of_page(page: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("folder", [page], indirect=True)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_tested_below(page):
    commands = re.sub(r"\\\n *", "", "".join(blocks(page, "sh")))
    assert commands.splitlines() == PAGES[page]


def test_start_marks_the_lines_that_are_new():
    plain, train = scripts("index")["plain.py"], scripts("index")["train.py"]
    ranges = re.search(r'hl_lines="([\d -]+)"', text("index"))[1].split()
    marked = set()
    for each in ranges:
        first, _, last = each.partition("-")
        marked |= set(range(int(first), int(last or first) + 1))
    matcher = difflib.SequenceMatcher(None, plain.splitlines(), train.splitlines())
    edits = [each for each in matcher.get_opcodes() if each[0] != "equal"]
    assert marked == {n + 1 for *_, first, end in edits for n in range(first, end)}


def test_start_checks_the_build(run, tmp_path):
    assert "TensorFlow" in run(CHECK_BUILD, tmp_path)


@of_page("index")
def test_start_trains_on_one_process_and_on_four_ranks(run, folder):
    assert "57/57" in run(PLAIN, folder)
    (folder / "digits.keras").unlink()
    printed = run(TRAIN, folder)
    assert len(re.findall("Epoch 10/10", printed)) == 1
    assert "15/15" in printed
    assert (folder / "digits.keras").exists()


@of_page("saving")
def test_a_job_resumes(run, folder):
    (command,) = PAGES["saving"]
    assert "Epoch 5/5" in run(command, folder)
    script = folder / "resume.py"
    script.write_text(script.read_text().replace("epochs=5", "epochs=7"))
    printed = run(command.replace("-np 2", "-np 1"), folder)
    assert "Epoch 5/7" not in printed
    assert "Epoch 6/7" in printed


@of_page("saving")
def test_a_model_is_saved_and_loaded(run, folder):
    save, load = blocks("saving", "python")
    script = folder / "resume.py"
    script.write_text(f"{script.read_text()}\n{save}keras_hvd.barrier()\n{load}")
    run("khvdrun -np 2 python resume.py", folder)
    assert (folder / "model.keras").exists()


@of_page("hangs")
def test_a_hang_is_reported(run, folder):
    printed = run(PAGES["hangs"][0], folder, exit_code=1)
    (shown,) = blocks("hangs", "text")
    for line in shown.splitlines():
        assert without_numbers(line) in without_numbers(printed)


def without_numbers(printed: str) -> str:
    return re.sub(r"\(pid \d+ on .*?\)|waited \d+ s", "", printed)


@of_page("hangs")
def test_a_signal_shows_where_a_rank_hangs(folder):
    script = folder / "hangs.py"
    script.write_text((folder / "shows_stacks.py").read_text() + script.read_text())
    options = ["-np", "2", "--stall-check-warning-time-seconds", "1"]
    khvdrun = [sys.executable, "-m", "keras_hvd.launch", *options]
    with subprocess.Popen(
        [*khvdrun, sys.executable, "hangs.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        lines = iter(job.stdout)
        pid = next(found[1] for found in map(find_pid, lines) if found)
        subprocess.run(f"kill -USR1 {pid}", shell=True, check=True)
        barrier = script.read_text().splitlines().index("keras_hvd.barrier()") + 1
        assert any(f'hangs.py", line {barrier} in <module>' in line for line in lines)
        job.terminate()


def find_pid(line: str) -> re.Match | None:
    return re.search(r"rank 1 \(pid (\d+)", line)


def test_a_script_for_tf_distribute_moves(run, tmp_path):
    (diff,) = blocks("from_tf_distribute", "diff")
    lines = [line or " " for line in diff.splitlines()]
    script = tmp_path / "train.py"
    losses = []
    for kept, command in (
        (" -", "python train.py"),
        (" +", *PAGES["from_tf_distribute"]),
    ):
        script.write_text("\n".join(line[1:] for line in lines if line[0] in kept))
        printed = run(command, tmp_path)
        losses.append(float(re.findall(r"\[(0\.\d+), 0\.\d+\]", printed)[-1]))
    assert losses[0] == pytest.approx(losses[1], abs=0.1)
