"""bazel/find_tensorflow.py, on the packages that TensorFlow comes in."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
FINDER = CHECKOUT / "bazel" / "find_tensorflow.py"


@pytest.fixture
def packages(tmp_path):
    """A folder of packages with a TensorFlow as PyPI has it, under no name yet."""
    root = tmp_path / "tensorflow"
    framework = root / "include" / "tensorflow" / "core" / "framework"
    framework.mkdir(parents=True)
    (framework / "op_kernel.h").touch()
    # Importing it takes seconds, and would show in the test's result.
    (root / "__init__.py").write_text("raise SystemExit('imported')")
    (root / "libtensorflow_framework.so.2").touch()
    (root / "libtensorflow_cc.so.2").touch()
    return tmp_path


def add_distribution(packages, name, version):
    info = packages / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def find(packages):
    code = (
        "import runpy, sys\n"
        "installed = [p for p in sys.path if 'site-packages' in p]\n"
        "sys.path[:] = [sys.argv[2], *(p for p in sys.path if p not in installed)]\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-I", "-c", code, FINDER, packages],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("tensorflow", "2.16.1"),
        ("tensorflow", "2.21.0"),
        ("tensorflow_cpu", "2.21.0"),
        ("tensorflow_cpu", "2.17.0rc1"),
        ("tf_nightly", "2.22.0.dev20261101"),
    ],
)
def test_every_name_it_is_published_under(packages, name, version):
    add_distribution(packages, name, version)
    done = find(packages)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "distribution": name.replace("_", "-"),
        "version": version,
        "root": str(packages / "tensorflow"),
        "include": str(packages / "tensorflow" / "include"),
        "xla": False,
    }


def test_what_xla_needs(packages):
    add_distribution(packages, "tensorflow", "2.21.0")
    xla = packages / "tensorflow" / "include" / "xla"
    for header, text in {
        "ffi/api/c_api.h": "typedef XLA_FFI_Future_Create(...);\n",
        "ffi/api/ffi.h": "class CountDownPromise {};\n",
        "hlo/builder/xla_builder.h": "XlaOp CustomCallWithLayout(...);\n",
    }.items():
        assert not json.loads(find(packages).stdout)["xla"]
        (xla / header).parent.mkdir(parents=True, exist_ok=True)
        (xla / header).write_text(text)
    assert json.loads(find(packages).stdout)["xla"]


def test_none(tmp_path):
    done = find(tmp_path)
    assert done.returncode == 1
    assert "has no TensorFlow; install it with: " in done.stderr


def test_folder_that_an_uninstalled_package_left_behind(tmp_path):
    (tmp_path / "tensorflow" / "python").mkdir(parents=True)
    done = find(tmp_path)
    assert done.returncode == 1
    assert "has no TensorFlow; install it with: " in done.stderr


def test_too_old(packages):
    add_distribution(packages, "tensorflow", "2.15.1")
    done = find(packages)
    assert done.returncode == 1
    assert "TensorFlow 2.15.1" in done.stderr
    assert "needs 2.16 or later" in done.stderr


@pytest.mark.parametrize(
    "missing",
    ["include/tensorflow/core/framework/op_kernel.h", "libtensorflow_cc.so.2"],
)
def test_incomplete(packages, missing):
    add_distribution(packages, "tensorflow", "2.21.0")
    (packages / "tensorflow" / missing).unlink()
    done = find(packages)
    assert done.returncode == 1
    assert f"lacks {missing}" in done.stderr


def test_of_no_known_package(packages):
    done = find(packages)
    assert done.returncode == 1
    assert "belongs to none of the packages tensorflow, tensorflow-cpu" in done.stderr
