"""Every example runs under khvdrun and keeps its promises."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import optuna
import pytest
from sklearn.datasets import load_digits

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
ON_HOSTS = pathlib.Path(__file__).resolve().parents[1] / "on_hosts.py"
# With the README.
TRIED_ELSEWHERE = {"digits.py", "ray_train.py", "spark_train.py"}


@pytest.fixture
def example(tmp_path):
    """Runs an example on these ranks, or on hosts with these; returns all output."""

    def run(
        name: str, *arguments: object, ranks: int = 2, hosts: tuple[int, ...] = ()
    ) -> str:
        command = [sys.executable, "-m", "keras_hvd.launch", "-np", ranks]
        if hosts:
            command = [sys.executable, ON_HOSTS, "--rate", "1gbit", *hosts]
        script = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
        done = subprocess.run(
            list(map(str, command + script)),
            cwd=tmp_path,
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "KERAS_HOME": str(tmp_path),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


def percentages(printed: str) -> list[float]:
    return [float(each) for each in re.findall(r"accuracy:? ([\d.]+)%", printed)]


def test_all_are_tried():
    here = pathlib.Path(__file__).read_text()
    untried = {p.name for p in EXAMPLES.glob("*.py") if f'"{p.stem}"' not in here}
    assert untried == TRIED_ELSEWHERE


def test_mnist_comes_to_the_same_weights_on_two_hosts(
    example, digits_like_mnist, tmp_path
):
    def train(**where) -> list[np.ndarray]:
        printed = example("mnist", "--data", digits_like_mnist, "--epochs", 2, **where)
        (accuracy,) = percentages(printed.split("Test")[1])
        assert accuracy > 70
        assert len((tmp_path / "mnist.csv").read_text().splitlines()) == 1 + 2
        return keras.saving.load_model(tmp_path / "mnist.keras").get_weights()

    on_one_host = train(ranks=3)
    for weight, other in zip(on_one_host, train(hosts=(2, 1)), strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=1e-9)


def test_custom_loop(example):
    losses = re.findall(r"loss[^:\n]*:? ([\d.]+)$", example("custom_loop"), re.M)
    assert float(losses[-1]) < 0.5 * float(losses[0])


def test_session(example):
    def steps_and_losses(printed):
        return re.findall(r"Step (\d+): loss ([\d.]+) over 2 rank", printed)

    begun = steps_and_losses(example("session", "--steps", 600))
    assert [int(step) for step, _ in begun] == [*range(0, 300, 50)]
    assert float(begun[-1][1]) < 0.3 * float(begun[0][1])
    # Started again, it goes on, on the rank without a checkpoint too.
    ((step, loss),) = steps_and_losses(example("session", "--steps", 700))
    assert int(step) == 300 and float(loss) < 0.3 * float(begun[0][1])


def test_image_folders(example, tmp_path):
    images, labels = load_digits(n_class=3, return_X_y=True)
    for number, (image, label) in enumerate(zip(images.reshape(-1, 8, 8), labels)):
        large = np.kron(image, np.full((4, 4), 255 / 16)).astype("uint8")
        folder = tmp_path / "images" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(folder / f"{number}.png", large[..., None], scale=False)
    command = ("image_folders", "images", "--batch-size", 32, "--epochs")
    assert "Made 2 epoch(s), from epoch 1 on" in example(*command, 2)
    # Started again, it goes on.
    printed = example(*command, 6)
    assert "Made 4 epoch(s), from epoch 3 on" in printed
    (accuracy,) = percentages(printed)
    assert accuracy > 60
    assert "Nothing is left to train" in example(*command, 6)


def test_data_service(example):
    printed = example("data_service", ranks=3)
    (accuracy,) = percentages(printed)
    assert accuracy > 85
    assert "All ranks together got 54 batches in an epoch" in printed


def test_optuna_search(example, tmp_path):
    def search(trials):
        printed = example("optuna_search", "--trials", trials, "--epochs", 3)
        return re.findall(r"Trial (\d+): ([\d.]+) with (.*)", printed)

    begun = search(2)
    assert [number for number, _, _ in begun] == ["0", "1"]
    # Started again, it goes on.
    more = search(3)
    assert [number for number, _, _ in more] == ["2"]
    study = optuna.load_study(
        study_name="search", storage=f"sqlite:///{tmp_path / 'study.db'}"
    )
    assert len(study.trials) == 3
    for trial, (_, accuracy, settings) in zip(study.trials, begun + more, strict=True):
        assert trial.state is optuna.trial.TrialState.COMPLETE
        assert str(trial.params) == settings
        assert trial.value == pytest.approx(float(accuracy), abs=1e-4)
        # The accuracy is that over the 397 test images of all ranks.
        assert trial.value * 397 == pytest.approx(round(trial.value * 397), abs=1e-3)
        assert len(trial.intermediate_values) == 3
    assert study.best_value > 0.5


def test_word2vec(example):
    printed = example("word2vec")
    # Words that stand in the same places come to lie close together.
    assert re.search(r"Closest to 'diesel': .*kerosene", printed)


@pytest.mark.parametrize("way", [(), ("--tape",)], ids=["fit", "tape"])
def test_synthetic_benchmark(example, way):
    printed = example(
        *("synthetic_benchmark", "--model", "MobileNetV3Small", "--image-size", 64),
        *("--batch-size", 2, "--num-warmup-batches", 1),
        *("--num-batches-per-iter", 1, "--num-iters", 2, *way),
    )
    per_rank, total = (
        float(re.search(rf"{what}: ([\d.]+) \+- [\d.]+$", printed, re.M)[1])
        for what in ("Images/s per rank", r"Total images/s on 2 rank\(s\)")
    )
    assert total == pytest.approx(2 * per_rank, abs=0.2)


def test_process_sets(example):
    narrow, wide = percentages(example("process_sets", ranks=4))
    assert narrow > 80 and wide > narrow


def test_adasum(example):
    (accuracy,) = percentages(example("adasum", "--epochs", 5))
    assert accuracy > 85


def test_strategy(example):
    printed = example("strategy").split("Test")[1]
    (accuracy,) = percentages(printed)
    assert accuracy > 90
    assert f"right: {accuracy:.2f}%" in printed


def test_join(example):
    printed = example("join", "--epochs", 2)
    # Rank 1 has twice as much data as rank 0.
    steps = {
        (int(epoch), int(rank)): int(count)
        for epoch, rank, count in re.findall(
            r"Epoch (\d): rank (\d) made (\d+) steps; rank 1 joined last", printed
        )
    }
    assert set(steps) == {(epoch, rank) for epoch in (1, 2) for rank in (0, 1)}
    assert steps[1, 1] > 1.8 * steps[1, 0]
