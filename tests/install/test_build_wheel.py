"""bazel/build_wheel.py: the TensorFlows that it takes, its lines, and Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types
import zipfile

import pytest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / "bazel" / "build_wheel.py"
MACHINE = os.uname().machine


def arguments_of(run, command: str) -> str:
    """The arguments that make gives the script."""
    # This test may run under a make that was asked for another TensorFlow.
    make = "env -u TENSORFLOW -u PYTHON make --dry-run"
    printed = run(f"{make} {command}", CHECKOUT, MAKEFLAGS="")
    (found,) = re.findall(r"build_wheel\.py (.*)", printed.replace("\\\n", ""))
    return " ".join(found.split())


def test_make_wheel_prefers_the_tensorflow_that_is_there(run):
    wanted = f"--python python3 --prefer-installed dist {MACHINE} '2.21.0'"
    assert arguments_of(run, "wheel") == wanted


def test_make_wheel_takes_the_tensorflow_that_is_asked_for(run):
    asked = "wheel TENSORFLOW='tensorflow[and-cuda]==2.20.*'"
    assert arguments_of(run, asked) == f"--python python3 dist {MACHINE} '2.20.*'"


def test_wheel_of_all_tensorflows_is_the_tested_one(run):
    every = "2.16.2 2.17.1 2.18.1 2.19.1 2.20.0 2.21.0"
    for target in ("wheel-all", "wheel-tests"):
        assert arguments_of(run, target).endswith(f" dist {MACHINE} {every}")
    ends = arguments_of(run, "ends-wheel-tests")
    assert ends.endswith(f" .venv/dist {MACHINE} 2.16.2 2.21.0")


@pytest.fixture
def script(monkeypatch, tmp_path) -> types.ModuleType:
    """The script, with steps that only leave files, as pip does."""
    spec = importlib.util.spec_from_file_location("build_wheel", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(command: list, **variables: str) -> None:
        if "download" in command:
            folder = command[command.index("--dest") + 1]
            distribution, version = command[-1].replace("*", "1").split("==")
            name = f"{distribution.replace('-', '_')}-{version}-py3-none-any.whl"
            with zipfile.ZipFile(pathlib.Path(folder, name), "w") as wheel:
                wheel.writestr("tensorflow/__init__.py", " " * 2_000_000)
        elif "wheel" in command:
            folder = command[command.index("--wheel-dir") + 1]
            pathlib.Path(folder, "keras_hvd-0.1.0-py3-none-any.whl").touch()

    monkeypatch.setattr(module, "_run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return module


def test_it_says_what_it_takes_and_a_line_for_each_step(script, tmp_path, capsys):
    installed = {"2.21.0": pathlib.Path("/packages")}
    arguments = (tmp_path / "dist", MACHINE, ["2.20.*", "2.21.0"], installed)
    script.build(*arguments)
    first, *lines = capsys.readouterr().out.splitlines()
    versions = "2.20.*, 2.21.0"
    assert first == (
        f"A wheel for {MACHINE} and TensorFlow {versions}: at most 6 minutes on two "
        "idle cores"
    )
    cache = tmp_path / "keras_hvd" / "tensorflow"
    lines[1] = re.sub(r"\d+ GB are free", "N GB are free", lines[1])
    assert lines == [
        "TensorFlow 2.21.0 is taken from /packages",
        f"To download, once: 250 MB. Unpacked into {cache}: 1 GB, N GB are free",
        "[1 of 4] downloading TensorFlow 2.20.* ... 2 MB, 0 s",
        "[2 of 4] building for TensorFlow 2.21.0 ... 0 s",
        "[3 of 4] building for TensorFlow 2.20.* ... 0 s",
        "[4 of 4] packing the wheel ... 0.0 MB, 0 s",
    ]
    script.build(*arguments)
    kept = capsys.readouterr().out.splitlines()
    assert f"TensorFlow 2.20.* is taken from {cache}/2.20.1-{MACHINE}" in kept
    assert "[1 of 3] building for TensorFlow 2.21.0 ... 0 s" in kept


def test_what_names_no_version_is_refused(run):
    printed = run("make wheel TENSORFLOW=tensorflow-cpu", CHECKOUT, exit_code=2)
    assert "'tensorflow-cpu' names no version of TensorFlow" in printed


BAZEL = """#!/bin/sh
trap 'sleep 1; echo stopped > "$MARK"; echo "ERROR: interrupted" >&2; exit 8' INT
echo begun > "$MARK"
while :; do sleep 0.1; done
"""


def test_ctrl_c_ends_it_with_one_line_and_waits_for_bazel(tmp_path):
    """Bazel's server would otherwise go on, and the next build wait for it."""
    bazel, mark = tmp_path / "bazel", tmp_path / "mark"
    bazel.write_text(BAZEL)
    bazel.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    with subprocess.Popen(
        [sys.executable, SCRIPT, "--prefer-installed", tmp_path, MACHINE, "2.21.0"],
        env={**os.environ, "PATH": path, "MARK": str(mark)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The group that the terminal's Ctrl-C reaches. In the background shells make
        # their programs ignore it, and these tests may run there.
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as build:
        deadline = time.monotonic() + 60
        while not mark.exists():
            assert build.poll() is None, build.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(build.pid, signal.SIGINT)
        printed, complaints = build.communicate(timeout=60)
    assert build.returncode == 130
    assert mark.read_text() == "stopped\n"
    assert printed.endswith("... interrupted; the next build keeps what is done\n")
    assert complaints == ""
