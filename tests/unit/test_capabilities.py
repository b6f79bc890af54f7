"""The capabilities that this version reports: the values, and Horovod's types."""

import ctypes
import subprocess
import sys

import pytest

import keras_hvd


@pytest.mark.parametrize(
    "name",
    [
        *("mpi_enabled", "gloo_built", "gloo_enabled"),
        *("rocm_built", "ddl_built", "ccl_built"),
    ],
)
def test_answers_before_init_without_the_engine(name):
    assert getattr(keras_hvd, name)() is False


def test_mpi_is_there_with_mpi4py(monkeypatch):
    pytest.importorskip("mpi4py")
    assert keras_hvd.mpi_built() is True
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "mpi4py")
    assert keras_hvd.mpi_built() is False


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_mpi_says_whether_threads_may_call_it(level):
    pytest.importorskip("mpi4py")
    program = f"""
import mpi4py
mpi4py.rc.thread_level = "{level}"
import keras_hvd
keras_hvd.init()
assert keras_hvd.mpi_threads_supported() is False
from mpi4py import MPI
expected = MPI.Query_thread() == MPI.THREAD_MULTIPLE
assert keras_hvd.mpi_threads_supported() is expected is ("{level}" == "multiple")
MPI.Finalize()
assert keras_hvd.mpi_threads_supported() is False
keras_hvd.shutdown()
try:
    keras_hvd.mpi_threads_supported()
except keras_hvd.exceptions.ShutDownError:
    print("refused")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert ended.stdout == "refused\n", ended.stderr


def devices_of_the_driver() -> int:
    """The number of GPUs, asked of the driver itself; 0 where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    driver.cuInit(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def test_cuda_and_nccl_are_what_is_found_here():
    """With the libraries that stand in for them: tests/launch/test_gpu_stand_ins.py."""
    devices = devices_of_the_driver()
    assert keras_hvd.cuda_built() is (devices > 0)
    version = keras_hvd.nccl_built()
    assert type(version) is int
    assert devices > 0 or version == 0


def test_without_a_driver_there_is_neither(monkeypatch):
    monkeypatch.setenv("KERAS_HVD_CUDA_LIBRARY", "/none/libcuda.so.1")
    assert keras_hvd.cuda_built() is False
    assert keras_hvd.nccl_built() == 0


def test_answers_of_a_job():
    keras_hvd.init()
    assert keras_hvd.mpi_threads_supported() is False
    assert keras_hvd.is_homogeneous() is True
