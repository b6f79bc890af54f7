"""What this version says that it is built with: the values, and Horovod's types."""

import ctypes

import pytest

import keras_hvd


@pytest.mark.parametrize(
    "name",
    [
        *("mpi_built", "mpi_enabled", "gloo_built", "gloo_enabled"),
        *("rocm_built", "ddl_built", "ccl_built"),
    ],
)
def test_answers_before_init_without_the_engine(name):
    assert getattr(keras_hvd, name)() is False


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
