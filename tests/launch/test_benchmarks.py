"""Each benchmark measures, prints its tables and writes a file for `report.py`."""

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import subprocess
import sys

import network
import numpy
import pytest

from keras_hvd.job import cores

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(tmp_path):
    """Runs a benchmark; returns its output and the JSON that it wrote."""

    def run(name: str, *arguments: object) -> tuple[str, dict]:
        printed = python(f"{name}.py", "--output", tmp_path, *arguments)
        (written,) = tmp_path.glob("*.json")
        assert written.name == f"{name}.json"
        if name not in ("hosts", "elastic"):
            assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
        result = json.loads(written.read_text())
        assert python("report.py", written).strip() in printed
        assert result["machine"]["cores"] >= 1
        return printed, result

    return run


def python(script: str, *arguments: object) -> str:
    command = [sys.executable, BENCHMARKS / script, *arguments]
    done = subprocess.run(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def requirements(result: dict) -> list[str]:
    return [check["what"] for check in result["checks"]]


def test_allreduce(benchmark):
    sizes = ["--most", 64, "--seconds", 0.01, "--rounds", 2]
    printed, result = benchmark("allreduce", "--ranks", 2, "--no-peers", *sizes)
    assert "Left out" not in printed
    measured = {(each["bytes"], each["series"]): each for each in result["measured"]}
    series = {"C API", "tf.function", "pass-through"} | {
        f"probe {kind}/{slot}"
        for kind in ("ordinary", "stream_result", "stream_all")
        for slot in (262144, 524288)
    }
    assert set(measured) == {(size, name) for size in (4, 16, 64) for name in series}
    for each in measured.values():
        assert 0 < each["p10"] <= each["median"] <= each["p90"]
        assert each["count"] >= 4
    assert "64 B, 2 ranks: C API" in requirements(result)
    assert "| 64 B" in printed


def test_gradients(benchmark):
    arguments = ["--workloads", "tiny", "--seconds", 0.01, "--rounds", 1]
    printed, result = benchmark("gradients", *arguments)
    row = result["measured"]["tiny"]
    functions = ("grouped", "pass_through", "computed_grouped", "computed_pass_through")
    assert set(row) == {*functions, "c_api", "c_api_group"}
    assert all(each["median"] > 0 for each in row.values())
    assert requirements(result) == [
        "160 tensors of 100 numbers: above the pass-through call",
        "160 tensors of 100 numbers, computed: above the pass-through call",
    ]
    assert "| 160 tensors of 100 numbers" in printed


def test_hosts(benchmark):
    if why := network.unavailable():
        pytest.skip(why)
    arguments = ["--peers", "--hosts", 2, "--networks", "unshaped", "--most", 64]
    arguments += ["--seconds", 0.01, "--rounds", 1, "--tls"]
    printed, result = benchmark("hosts", *arguments)
    ((title, measured),) = result["measured"].items()
    assert title == "2 hosts of 1, unshaped, keras_hvd with TLS"
    assert list(measured) == ["4 B", "16 B", "64 B"]
    assert all(row["keras_hvd"]["median"] > 0 for row in measured.values())
    assert "| 64 B" in printed


def test_elastic(benchmark):
    """Newcomers have no step before, and a host that vanishes takes its ranks."""
    few = ["--trainings", "numpy", "--peers", "--deaths", 1, "--death-rounds", 1]
    few += ["--megabytes", 32, "--joinings", 1]
    few += ["--rounds", 1, "--steps", 2, "--batch", 8, "--commit", 1]
    printed, result = benchmark("elastic", *few)
    kinds = ["one host, NumPy and the C API"]
    if not network.unavailable():
        kinds += ["two hosts, NumPy and the C API"]
        if network.has_ssh():
            kinds += ["two hosts, one vanishes, NumPy and the C API"]
    deaths = result["measured"]["deaths"]
    assert list(deaths) == kinds
    for found in deaths.values():
        assert found["seconds"]["count"] == 1
        assert found["seconds"]["median"] > 0
        assert found["traces"] == 0
    assert 0 < deaths[kinds[0]]["step"]["median"] < deaths[kinds[0]]["pause"]["median"]
    assert all(each["median"] > 0 for each in result["measured"]["state"].values())
    assert list(result["measured"]["speed"]) == [
        "fit",
        "elastic.fit",
        "elastic.run, a commit every 1 batches",
        "fit of from_arrays",
        "elastic.fit, batches_per_commit=1",
    ]
    assert f"{kinds[0]}: until the others' next step, median" in requirements(result)
    assert "| elastic.fit" in printed


VARIANT = "one inter-op thread"


def test_scaling(benchmark):
    arguments = ["--rounds", 2, "--steps", 2, "--batch", 8, "--variants", VARIANT]
    printed, result = benchmark("scaling", *arguments)
    assert result["refused"] == {}
    found = result["measured"][VARIANT]
    copies = {"independent copies", "copies that meet"}
    assert set(found) == copies | {"DistributedOptimizer", "Strategy"}
    for each in found.values():
        assert each["seconds"]["count"] == 2
        assert all(each[against]["median"] > 0 for against in copies)
    for each in copies:
        assert found[each][each]["median"] == 1
    assert requirements(result) == [
        f"{VARIANT}, 2 ranks, DistributedOptimizer: speed of copies that meet",
        f"{VARIANT}, 2 ranks, Strategy: speed of copies that meet",
    ]
    assert f"| {VARIANT}" in printed


def test_speed(benchmark, tmp_path):
    few = ["--rounds", 2, "--steps", 2, "--batch", 8, "--ranks", 1, 2]
    peer = "MultiWorkerMirroredStrategy"
    printed, result = benchmark("speed", *few, "--peers", peer)
    assert result["notes"] == []
    assert set(result["measured"]) == {"1", "2"}
    for found in result["measured"].values():
        assert set(found) == {"keras_hvd", "copies that exchange nothing", peer}
        assert all(each["median"] > 0 for each in found.values())
    assert "| 2 against 1 |" in printed
    picture = (tmp_path / "speed.svg").read_text()
    assert all(text in picture for text in ("1 rank", "2 ranks", peer))


def test_speed_leaves_out_what_does_not_run(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import measurement
    import speed

    def broken(ranks: int, *arguments: object) -> measurement.Job:
        raise measurement.ContenderError("it raises")

    monkeypatch.setattr(speed, "OURS", {})
    monkeypatch.setattr(speed, "PEERS", {"a peer": broken})
    options = argparse.Namespace(steps=2, batch=8, peers=["a peer"])
    notes = []
    assert speed.start(2, options, contextlib.ExitStack(), notes) == {}
    assert notes == ["Without a peer on 2 ranks: it raises"]


def test_speed_refuses_ranks_that_train_models_of_their_own(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import measurement
    import speed

    speed.require_equal_weights("a peer", [{"norm": 21.5}, {"norm": 21.5}])
    with pytest.raises(measurement.ContenderError, match="the ranks' weights differ"):
        speed.require_equal_weights("a peer", [{"norm": 21.5}, {"norm": 21.6}])


def test_allocator(benchmark):
    workload, few = "allreduce/1", ["--rounds", 1, "--without-onednn"]
    arguments = ["--workloads", workload, "--allocators", "pool", *few]
    printed, result = benchmark("allocator", *arguments)
    assert set(result["measured"][workload]) == {"pool", "C API"}
    for found in result["measured"][workload].values():
        assert found["seconds"]["median"] > 0
        assert found["faults"] >= 0
        assert 0 < found["first"] <= found["peak"]
        assert 0 < found["last"] <= found["peak"]
    (requirement,) = requirements(result)
    assert requirement == "allreduce/1 MiB in a tf.function, pool: against the C API"
    assert "| allreduce/1" in printed


@pytest.fixture
def null_libraries(monkeypatch) -> dict[str, pathlib.Path]:
    """A CUDA and an NCCL that do nothing, which the engine opens from now on."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import environments

    made = {name: environments.compiled(f"null_{name}.c") for name in ("cuda", "nccl")}
    for name, library in made.items():
        monkeypatch.setenv(f"KERAS_HVD_{name.upper()}_LIBRARY", str(library))
    return made


FEW_ON_GPUS = ("--ranks", 2, "--most", 4, "--seconds", 0.01, "--rounds", 2, "--row", 2)
FEW_ON_GPUS += ("--chunk-bytes", 4096)


def test_gpu_allreduce(benchmark, null_libraries):
    through_tensorflow = ["--tensorflow-device", "CPU", "--steps", 2]
    through_tensorflow += ["--jit-compile", "no"]
    printed, result = benchmark("gpu_allreduce", *FEW_ON_GPUS, *through_tensorflow)
    assert result["notes"] == []
    assert requirements(result) == [
        "4 B: one call, above bare NCCL",
        "ResNet-50's 161 gradients (102 MB): host above bare NCCL",
        "4 B in a tf.function: above tf.identity",
        "fit with jit_compile=False: a step, to copies and NCCL",
    ]
    measured = result["measured"]
    for tensors in (*measured["by_size"].values(), measured["resnet50"]):
        assert all(tensors[who]["host"]["median"] > 0 for who in ("engine", "nccl"))
    assert list(measured["functions"]) == ["4", "ResNet-50's 161 gradients"]
    for found in (*measured["functions"].values(), *measured["fit"].values()):
        assert all(each["median"] > 0 for each in found.values())
    assert "| ResNet-50's 161 gradients" in printed


def test_the_gpu_benchmarks_need_numpy_alone(null_libraries, tmp_path, monkeypatch):
    """Not even keras_hvd is installed, and ranks share a GPU."""
    python = tmp_path / "bin" / "python"
    made = [sys.executable, "-m", "venv", "--without-pip", tmp_path]
    subprocess.run(list(map(str, made)), check=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    for found in pathlib.Path(numpy.__file__).parents[1].glob("numpy*"):
        (packages / found.name).symlink_to(found)
    variables = {
        **os.environ,
        "PYTHONPATH": str(packages),
        "NULL_CUDA_DEVICES": "1",
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none"),
    }
    for command, said in (
        (["gpu_calls.py", "--rows", 1, "--calls", 10], "| groups at once"),
        (["gpu_allreduce.py", *FEW_ON_GPUS], "No module named 'tensorflow'."),
    ):
        done = subprocess.run(
            [python, BENCHMARKS / command[0], *map(str, command[1:])]
            + ["--output", tmp_path],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=variables,
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert "No plot: matplotlib is not installed" in done.stdout
    assert "2 ranks on 1 GPU" in done.stdout
    assert "Ranks share a GPU without NVIDIA's Multi-Process Service" in done.stdout


def test_a_service_for_several_processes_is_found(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_allreduce

    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not gpu_allreduce.mps_runs(variables)
    (tmp_path / "control").touch()
    assert gpu_allreduce.mps_runs(variables)


def test_the_gradients_of_the_network_that_is_trained(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "contenders")
    import training
    import workloads

    weights = training.cnn().trainable_variables
    assert [list(weight.shape) for weight in weights] == workloads.cnn()


def test_gpu_calls(benchmark):
    """The counts of the engine for a collective on GPUs, which times do not show."""
    if cores.available() < 2:
        pytest.skip("two ranks that share a core have to sleep")
    printed, result = benchmark("gpu_calls")
    missed = [
        f"{check['what']}: {check['measured']}, at most {check['wanted']}"
        for check in result["checks"]
        if check["measured"] > check["wanted"]
    ]
    assert len(result["checks"]) == 20
    assert not missed, printed
    assert "| groups at once" in printed


class NcclConfig(ctypes.Structure):
    """The beginning of ncclConfig_t."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


UNSET = -(1 << 31)
SUCCESS, IN_PROGRESS = 0, 7


@pytest.mark.parametrize(
    ("mode", "blocking", "result"),
    [
        ("thread", 1, SUCCESS),
        ("thread", 0, IN_PROGRESS),
        ("thread", UNSET, IN_PROGRESS),
        ("thread", None, IN_PROGRESS),
        ("sync", 0, SUCCESS),
    ],
)
def test_the_null_nccl_splits_a_communicator(
    null_libraries, monkeypatch, mode, blocking, result
):
    """A part blocks as configured, else as its parent; others have threads."""
    monkeypatch.syspath_prepend(BENCHMARKS / "contenders")
    monkeypatch.setenv("NULL_NCCL_MODE", mode)
    import bare_nccl

    def config(blocks: int):
        return ctypes.byref(NcclConfig(ctypes.sizeof(NcclConfig), blocking=blocks))

    nccl = ctypes.CDLL(null_libraries["nccl"])
    parent, part, state = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    unique_id = bare_nccl.UniqueId()
    made = nccl.ncclCommInitRankConfig(
        ctypes.byref(parent), 2, unique_id, 0, config(blocks=0)
    )
    assert made == SUCCESS
    given = None if blocking is None else config(blocking)
    assert nccl.ncclCommSplit(parent, 0, 0, ctypes.byref(part), given) == SUCCESS
    for _ in range(2):
        assert nccl.ncclSend(None, 0, 0, 1, part, None) == result
    while result == IN_PROGRESS:
        assert nccl.ncclCommGetAsyncError(part, ctypes.byref(state)) == SUCCESS
        result = state.value
    assert nccl.ncclCommDestroy(part) == nccl.ncclCommDestroy(parent) == SUCCESS
