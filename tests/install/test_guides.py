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
        'pip install "$(echo dist/keras_hvd-*.whl)[tensorflow-cpu]" scikit-learn',
        "khvdrun --check-build",
        "python plain.py",
        "khvdrun -np 4 python train.py",
        "khvdrun -np 1 python augmented.py",
        "khvdrun -np 2 python augmented.py",
    ],
    "failures": [
        "khvdrun -np 2 python dies.py",
        "khvdrun -np 2 --term-after 60 python goes_on.py",
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
CHECK_BUILD, PLAIN, TRAIN, *AUGMENTED = PAGES["index"][1:]


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
    alone = run(PLAIN, folder)
    (folder / "digits.keras").unlink()
    together = run(TRAIN, folder)
    assert len(re.findall("Epoch 10/10", together)) == 1
    shown = re.findall(r"^```text title=.*?\n(.*?)^```$", text("index"), re.M | re.S)
    for printed, page in zip((alone, together), shown, strict=True):
        for line in page.splitlines():
            assert without_digits(line) in without_digits(printed)
    last_losses = [
        re.findall(r"loss: ([\d.]+)", each)[-1] for each in (alone, together)
    ]
    assert last_losses[0] == last_losses[1]
    assert (folder / "digits.keras").exists()


@of_page("index")
def test_start_trains_on_data_made_in_python(run, folder):
    alone, together = (run(command, folder) for command in AUGMENTED)
    assert "56/56" in alone
    assert "28/28" in together


def without_digits(printed: str) -> str:
    """The text without digits, and without the styles of progress bars."""
    printed = re.sub(r"\x1b\[\d+m", "", printed)
    return re.sub(r"(?<=\d),(?=\d{3})|\d", "", printed)


@of_page("failures")
def test_a_death_is_told(run, folder):
    printed = run(PAGES["failures"][0], folder, exit_code=137)
    for line in blocks("failures", "text")[1].splitlines():
        assert without_process(line) in without_process(printed)


def without_process(printed: str) -> str:
    return re.sub(r"\(pid \d+ on .*?\)|process \d+", "", printed)


@of_page("failures")
def test_a_rank_goes_on_alone(run, folder):
    run(PAGES["failures"][1], folder, exit_code=137)
    assert (folder / "model.keras").exists()


@of_page("saving")
def test_a_job_resumes(run, folder):
    (command,) = PAGES["saving"]
    script = folder / "resume.py"
    whole = script.read_text()
    dies = (
        "keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: "
        "keras_hvd.rank() == 1 and epoch == 2 and __import__('os').kill(0, 9)),"
    )
    script.write_text(whole.replace("callbacks=[", f"callbacks=[{dies}"))
    killed = run(command, folder, exit_code=137)
    script.write_text(whole)
    resumed = run(command, folder)
    assert "Epoch 2/5" in killed
    assert "Epoch 2/5" not in resumed
    assert "Epoch 3/5" in resumed
    # With the weights, too: else it would begin as high as the first run.
    assert losses(resumed)[0] < losses(killed)[-1]
    script.write_text(whole.replace("epochs=5", "epochs=7"))
    longer = run(command.replace("-np 2", "-np 1"), folder)
    assert "Epoch 5/7" not in longer
    assert "Epoch 6/7" in longer
    assert losses(longer)[0] < losses(resumed)[-1]


def losses(printed: str) -> list[float]:
    """The loss of each whole epoch."""
    return [
        float(each)
        for each in re.findall(r"(?:step|samples/s) - loss: ([\d.e-]+)", printed)
    ]


@of_page("saving")
def test_a_model_is_saved_and_loaded(run, folder):
    save, load = blocks("saving", "python")
    script = folder / "resume.py"
    script.write_text(f"{script.read_text()}\n{save}{load}")
    run("khvdrun -np 2 python resume.py", folder)
    assert (folder / "model.keras").exists()


# Each line is a claim of training.md, data.md and from_tf_distribute.md.
ON_TWO_RANKS = """
import keras, numpy as np, tensorflow as tf
import keras_hvd

keras_hvd.init()
rank, size = keras_hvd.rank(), keras_hvd.size()
x = np.random.default_rng(0).random((203, 3)).astype("float32")
y = x.sum(axis=1)
model = keras.Sequential([keras.layers.Dense(1)])
optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
model.compile(optimizer, "mse", metrics=["mae"])
callbacks = [
    keras_hvd.callbacks.BroadcastGlobalVariables(0),
    keras_hvd.callbacks.MetricAverage(),
]
SNIPPET
assert len(dataset) == 4  # 203 rows, in 7 batches of 32
uneven = slice(0, 150) if rank == 0 else slice(150, None)
for part in (slice(None), uneven):
    fitted = model.fit(
        dataset,
        validation_data=(x[part], y[part]),
        callbacks=callbacks,
        verbose=0,
    )
    whole = model.evaluate(x, y, return_dict=True, verbose=0)
    of_parts = keras_hvd.evaluate(model, x[part], y[part], return_dict=True, verbose=0)
    for name, value in whole.items():
        np.testing.assert_allclose(fitted.history[f"val_{name}"], [value], rtol=1e-4)
        np.testing.assert_allclose(of_parts[name], value, rtol=1e-4)
print(f"rows {len(x[uneven])}\\n", end="")
if rank == 0:
    optimizer.apply([tf.ones((3, 1)), tf.ones(1)], model.trainable_variables)
"""


def test_pipelines_and_parts_of_validation_data(run, tmp_path):
    snippet = next(each for each in blocks("data", "python") if "even(" in each)
    (tmp_path / "train.py").write_text(ON_TWO_RANKS.replace("SNIPPET", snippet))
    printed = run("khvdrun -np 2 python train.py", tmp_path, exit_code=1)
    assert "[0] rows 150\n" in printed and "[1] rows 53\n" in printed
    # The last step is of one rank only.
    said = re.search(r"cannot be completed: (rank 1 .*shutdown)`", flat("hangs"))[1]
    assert without_numbers(said) in without_numbers(printed)


def flat(page: str) -> str:
    return re.sub(r"\s+", " ", text(page))


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
    options += ["--stall-check-shutdown-time-seconds", "60"]
    khvdrun = [sys.executable, "-m", "keras_hvd.launch", *options]
    with subprocess.Popen(
        [*khvdrun, sys.executable, "hangs.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        lines = iter(job.stdout)
        try:
            pid = next(found[1] for found in map(find_pid, lines) if found)
            subprocess.run(f"kill -USR1 {pid}", shell=True, check=True)
            barrier = script.read_text().splitlines().index("keras_hvd.barrier()") + 1
            place = f'hangs.py", line {barrier} in <module>'
            assert any(place in line for line in lines)
        finally:
            job.terminate()


def find_pid(line: str) -> re.Match | None:
    # It may be late for the first allreduce, and be named for that, too.
    return re.search(r"rank 1 \(pid (\d+) .*its last was barrier", line)


def test_a_script_for_tf_distribute_moves(run, tmp_path):
    (diff,) = blocks("from_tf_distribute", "diff")
    lines = [line or " " for line in diff.splitlines()]
    script = tmp_path / "train.py"
    found = []
    for kept, command in (
        (" -", "python train.py"),
        (" +", *PAGES["from_tf_distribute"]),
    ):
        moved = "\n".join(line[1:] for line in lines if line[0] in kept)
        seeded = "keras.utils.set_random_seed(1)\nx, y ="
        script.write_text(moved.replace("x, y =", seeded, 1))
        printed = run(command, tmp_path)
        found.append(float(re.findall(r"\[(0\.\d+), 0\.\d+\]", printed)[-1]))
    assert found[0] == pytest.approx(found[1], rel=1e-3)
