"""Every command of the README does what the README says."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
README = (CHECKOUT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def commands() -> list[str]:
    lines = "".join(blocks("sh")).splitlines()
    return [line.split("#")[0].strip() for line in lines if line.strip()]


def script(kept: str) -> str:
    """One side of the README's diff; `kept` has the first characters of its lines."""
    (diff,) = blocks("diff")
    lines = [line or " " for line in diff.splitlines()]
    return "\n".join(line[1:] for line in lines if line[0] in kept) + "\n"


LOADING = """
import keras, sys
for path in sys.stdin:
    model = keras.models.load_model(path.strip())
    print('keras_hvd' in sys.modules, model.optimizer.name, flush=True)
"""


@pytest.fixture(scope="module")
def loads_without_keras_hvd() -> Iterator[Callable[[pathlib.Path], bool]]:
    """One process that loads the models of any number of trainings."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", LOADING], **pipes) as process:

        def loads(folder: pathlib.Path) -> bool:
            print(folder / "digits.keras", file=process.stdin, flush=True)
            return process.stdout.readline() == "False adam\n"

        yield loads
        process.communicate()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(script(kept=" +"))
    return tmp_path


def test_every_command_is_tested_below():
    assert commands() == [
        "make demo",
        "make test",
        "khvdrun -np 2 python train.py",
        "python train.py",
        "mpirun -np 2 python train.py",
        # In test_build_wheel.py.
        "make wheel",
        # In tests/wheel, where the wheel is.
        'pip install "$(echo dist/keras_hvd-*.whl)[tensorflow-cpu]"',
    ]


def test_make_demo(run):
    printed = run("make demo", CHECKOUT)
    (accuracy,) = re.findall(r"[Tt]est accuracy\D*([\d.]+)", printed)
    percent = float(accuracy) if float(accuracy) > 1 else 100 * float(accuracy)
    assert percent >= 96


def test_make_test(run):
    """This test is part of it, and would never end. So make only prints its steps."""
    printed = run("make --dry-run test", CHECKOUT, MAKEFLAGS="")
    for step in ("ruff check", "bazel test", "tests/unit", "tests/parallel"):
        assert step in printed


@pytest.mark.parametrize(
    "command",
    ["khvdrun -np 2 python train.py", "mpirun -np 2 python train.py"],
)
def test_training_on_two_processes(run, command, folder, loads_without_keras_hvd):
    printed = run(command, folder)
    assert len(re.findall(r"Epoch 10/10", printed)) == 1
    assert printed.count("29/29") >= 10
    assert loads_without_keras_hvd(folder)


def test_training_on_one_process(run, folder, loads_without_keras_hvd):
    assert "57/57" in run("python train.py", folder)
    assert loads_without_keras_hvd(folder)


def test_script_before(run, folder, loads_without_keras_hvd):
    (folder / "train.py").write_text(script(kept=" -"))
    assert "57/57" in run("python train.py", folder)
    assert loads_without_keras_hvd(folder)


def test_links():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if not target.startswith("https:"):
            assert (CHECKOUT / target).exists(), target
