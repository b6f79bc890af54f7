"""The answers of `khvdrun --check-build`, also where a part is missing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.job import native
from keras_hvd.version import __version__

PACKAGE = Path(keras_hvd.__file__).parent


def answers(text: str) -> dict[str, tuple[str, str]]:
    """The yes or no, and the reason, of each part."""
    rows = re.findall(r"^  (yes|no) +(.+?)  +(.*)$", text, re.MULTILINE)
    return {name: (answer, reason) for answer, name, reason in rows}


def check_build(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "keras_hvd.launch", "--check-build", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )


def path_with_srun(folder: Path, script: str) -> str:
    """A PATH on which srun is this script."""
    srun = folder / "srun"
    srun.write_text(f"#!/bin/sh\n{script}\n")
    srun.chmod(0o700)
    return f"{folder}:{os.environ['PATH']}"


# It imports TensorFlow and Keras each time, which takes long.
@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """Its answers with all optional parts, and the path of srun.

    As a rank of a job, mpi4py would look for a server that is not there.
    """
    folder = tmp_path_factory.mktemp("whole")
    path = path_with_srun(folder, "echo slurm 22.05.8")
    job = {"PMI_FD": "99", "PMI_RANK": "1", "PMI_SIZE": "2"}
    return check_build(PATH=path, **job), folder / "srun"


@pytest.fixture(scope="module")
def poor(tmp_path_factory) -> subprocess.CompletedProcess:
    """Its answers without TLS and SLURM, with a job on the same command line."""
    folder = tmp_path_factory.mktemp("poor")
    path = path_with_srun(folder, "echo no configuration >&2; exit 1")
    library = "/none/libssl.so.3"
    return check_build("-np", "2", PATH=path, KERAS_HVD_SSL_LIBRARY=library)


def test_finds_what_is_built(whole):
    ended, _ = whole
    found = answers(ended.stdout)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.startswith(f"keras_hvd {__version__} in {PACKAGE}\n")
    assert list(found) == [
        "engine",
        "TensorFlow",
        "TensorFlow ops",
        "Keras",
        "shared memory",
        "TLS",
        "MPI",
        "munge",
        "SLURM",
        "CUDA",
        "NCCL",
    ]
    assert [found[name][0] for name in list(found)[:5]] == ["yes"] * 5
    has_xla = native.ops_info(tf.__version__)["xla"]
    assert ("jit_compile=True" in found["TensorFlow ops"][1]) is not has_xla
    assert found["engine"][1].endswith(f"libkeras_hvd.so, version {__version__}")
    assert re.fullmatch(
        r"OpenSSL \d.* \(/.*/libssl\.so\S*\), for --tls", found["TLS"][1]
    )
    assert all(reason for _, reason in found.values())


def test_says_why_there_is_no_tls_whatever_job_is_asked_for(poor):
    answer, reason = answers(poor.stdout)["TLS"]
    assert (poor.returncode, answer) == (0, "no")
    assert reason.startswith(
        "there is no /none/libssl.so.3. Install OpenSSL 1.1.1b or "
    )


def test_says_which_mpi_mpi4py_uses(whole):
    mpi4py = pytest.importorskip("mpi4py.MPI")
    ended, _ = whole
    answer, reason = answers(ended.stdout)["MPI"]
    name, major = mpi4py.get_vendor()[0], mpi4py.get_vendor()[1][0]
    assert answer == "yes", reason
    assert re.fullmatch(rf"{name} .*{major}\..*, with thread level MULTIPLE", reason)


def test_says_why_there_is_no_slurm(whole, poor):
    ended, srun = whole
    assert answers(ended.stdout)["SLURM"] == ("yes", f"slurm 22.05.8 ({srun})")
    assert answers(poor.stdout)["SLURM"] == ("no", "no configuration")


def test_says_what_is_missing(tmp_path):
    copy = tmp_path / "keras_hvd"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("_native"))
    ended = subprocess.run(
        [sys.executable, "-m", "keras_hvd.launch", "--check-build"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    found = answers(ended.stdout)
    assert ended.returncode == 1
    assert ended.stderr == ""
    assert found["engine"][0] == found["TensorFlow ops"][0] == "no"
    assert "not built" in found["engine"][1]
    assert found["shared memory"][0] == "yes"
