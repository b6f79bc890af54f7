"""The tests of GPUs without a GPU: over the libraries that stand in for CUDA and NCCL.

The stand-in of NCCL joins ranks of one process, so that several go through host memory
here, and one needs none. The messages of the tests without a GPU are tested too.
"""

import json
import operator
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
STAND_INS = "//tf_ops/testing/gpu:libcuda.so.1", "//tf_ops/testing/gpu:libnccl.so.2"
# As `make test-gpu` runs them.
GPU_TESTS = (
    *(sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={CHECKOUT}"),
    *("--import-mode=importlib", "-p", "no:cacheprovider", "-q", "-rs", "tests/gpu"),
)
NO_GPU = {"KERAS_HVD_CUDA_LIBRARY": "/none/libcuda.so.1"}
REASON = "there is no CUDA driver in /none/libcuda.so.1"


@pytest.fixture(scope="module")
def stand_ins() -> dict[str, str]:
    """Variables that make the engine open the stand-ins, with one device."""
    python = f"--repo_env=PYTHON_BIN_PATH={sys.executable}"
    subprocess.run(
        ["bazel", "build", "--config=quiet", python, *STAND_INS],
        cwd=CHECKOUT,
        check=True,
        timeout=290,
    )
    folder = CHECKOUT / "bazel-bin" / "tf_ops" / "testing" / "gpu"
    return {
        "KERAS_HVD_CUDA_LIBRARY": str(folder / "libcuda.so.1"),
        "KERAS_HVD_NCCL_LIBRARY": str(folder / "libnccl.so.2"),
        "KERAS_HVD_STAND_IN_DEVICES": "1",
    }


def run(*command: object, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=280,
        cwd=CHECKOUT,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize(
    ("chosen", "passed"),
    [
        ("1-rank and NCCL and (collectives or steps)", 3),
        ("2-ranks and host and not compared", 3),
        ("4-ranks and host and (steps or kill)", 2),
    ],
)
def test_the_c_api(stand_ins, chosen, passed):
    ended = run(
        *(*GPU_TESTS, "--steps", 30, "-k", f"({chosen}) and not training"), **stand_ins
    )
    assert ended.returncode == 0, ended.stdout
    assert re.search(rf"^{passed} passed, \d+ deselected", ended.stdout, re.MULTILINE)


def test_a_communicator_that_cannot_be_made_is_done_without(stand_ins, tmp_path):
    # The stand-in fails on rank 1, whose process does not know rank 0's ID, while rank
    # 0 waits in its init.
    variables = {**stand_ins, "KERAS_HVD_STAND_IN_DEVICES": "2"}
    ranks = [start_rank(rank, tmp_path, variables) for rank in range(2)]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    errors = [(tmp_path / f"stderr {rank}").read_text() for rank in range(2)]
    assert [json.loads(line) for line in said] == [{"steps": 10}] * 2, errors
    assert errors[0] == ""
    assert re.fullmatch(
        r"keras_hvd \[rank 1\] warning: collectives of tensors on GPUs go through host "
        rf"memory, which is slow: rank 1 \(pid {ranks[1].pid} on .*\) could not "
        r"make a communicator with the others: NCCL failed in "
        r"ncclCommInitRankConfig: invalid argument.*\n",
        errors[1],
    )


def start_rank(rank: int, folder: Path, variables: dict[str, str]) -> subprocess.Popen:
    """One of two ranks of the tests of GPUs, each with a device, for random steps."""
    plan = {
        "task": "steps",
        "steps": 10,
        "engine": str(CHECKOUT / "keras_hvd" / "_native" / "libkeras_hvd.so"),
        "cuda": variables["KERAS_HVD_CUDA_LIBRARY"],
        "nccl": variables["KERAS_HVD_NCCL_LIBRARY"],
        "job": f"{folder.name}-{os.getpid()}",
        "rank": rank,
        "size": 2,
        "device": rank,
    }
    program = CHECKOUT / "tests" / "gpu" / "ranks" / "rank.py"
    with open(folder / f"stderr {rank}", "wb") as errors:
        return subprocess.Popen(
            [sys.executable, program, json.dumps(plan)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **variables},
        )


def test_check_build_names_what_it_finds(stand_ins, khvdrun):
    found = khvdrun.run("--check-build", env=stand_ins, timeout=120).stdout
    cuda, nccl = (
        stand_ins["KERAS_HVD_CUDA_LIBRARY"],
        stand_ins["KERAS_HVD_NCCL_LIBRARY"],
    )
    page = (CHECKOUT / "docs" / "gpus.md").read_text()
    documented = re.search(r"^  yes  CUDA .*\n  yes  NCCL .*\n", page, re.M)[0]
    documented = documented.replace("libcuda.so.1", cuda)
    documented = re.sub(r"/venv.*(?=\))", nccl, documented)
    assert documented.replace("4 devices", "1 device") in found


def test_check_build_names_nccl_without_a_gpu_too(stand_ins, khvdrun):
    """Images are made on machines that have none."""
    variables = {**stand_ins, **NO_GPU}
    found = khvdrun.run("--check-build", env=variables, timeout=120).stdout
    assert f"  no   CUDA            {REASON}\n" in found
    nccl = stand_ins["KERAS_HVD_NCCL_LIBRARY"]
    assert f"  yes  NCCL            NCCL 2.23.4 ({nccl})\n" in found


def test_one_rank_says_that_a_profiler_lacks_nvtx(khvdrun):
    profiler = {
        "NVTX_INJECTION64_PATH": "/none/profiler.so",
        "KERAS_HVD_NVTX_LIBRARY": "/none/libnvtx.so.1",
    }
    command = ("-np", "2", sys.executable, "-c", "import keras_hvd; keras_hvd.init()")
    ended = khvdrun.run(*command, env=profiler, timeout=120)
    assert ended.returncode == 0, ended.stderr
    reason = "gets no NVTX ranges: there is no NVTX in /none/libnvtx.so.1"
    assert ended.stderr.count(reason) == 1


@pytest.mark.parametrize(
    ("variables", "devices", "version", "reason"),
    [
        ({}, 1, 22304, ""),
        ({"KERAS_HVD_STAND_IN_NCCL_VERSION": "21805"}, 1, 0, "is too old: keras_hvd"),
        ({"KERAS_HVD_NCCL_LIBRARY": "/none/nccl"}, 1, 0, "there is no NCCL in /none"),
        ({"KERAS_HVD_STAND_IN_DEVICES": "0"}, 0, 0, "NCCL 2.23.4 ("),
        (NO_GPU, 0, 0, "NCCL 2.23.4 ("),
    ],
)
def test_what_is_found(stand_ins, variables, devices, version, reason):
    program = (
        "import keras_hvd; from keras_hvd.job import gpu_libraries; "
        "print(keras_hvd.cuda_built(), keras_hvd.nccl_built()); "
        "print(gpu_libraries.support().nccl)"
    )
    ended = run(sys.executable, "-c", program, **{**stand_ins, **variables})
    built, said = ended.stdout.splitlines()
    assert built == f"{devices > 0} {version}"
    assert reason in said


def test_the_benchmark_measures(stand_ins, tmp_path):
    sizes = ("--most", 64, "--seconds", 0.01, "--rounds", 2, "--row", 2)
    busy = ("--chunks", 2, "--chunk-bytes", 4096, "--ranks", 1)
    command = (sys.executable, CHECKOUT / "benchmarks" / "gpu_allreduce.py")
    variables = {**stand_ins, "CUDA_VISIBLE_DEVICES": "-1"}
    ended = run(*command, "--output", tmp_path, *sizes, *busy, **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Without a tf.function and fit: TensorFlow sees no GPU.\n" in ended.stdout
    assert "| bare NCCL" in ended.stdout
    result = json.loads((tmp_path / "gpu_allreduce.json").read_text())
    assert result["checks"] == []  # NCCL does nothing for one rank
    for who in ("engine", "nccl"):
        work = result["measured"]["overlap"][who]
        assert len(work["computed"]) == len(work["reduced"]) == 2
        assert all(map(operator.le, work["computed"], work["reduced"])), work


def test_without_a_gpu_all_is_skipped_with_the_reason():
    ended = run(*GPU_TESTS, **NO_GPU)
    assert ended.returncode == 0, ended.stdout
    assert f"no GPU: {REASON}" in ended.stdout
    assert re.search(r"^\d+ skipped in", ended.stdout, re.MULTILINE)


def test_without_a_gpu_the_benchmark_says_so():
    ended = run(sys.executable, CHECKOUT / "benchmarks" / "gpu_allreduce.py", **NO_GPU)
    assert ended.returncode == 1
    assert ended.stderr == f"No GPU: {REASON}\n"
