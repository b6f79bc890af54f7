"""What this version says that it is built with: the values, and Horovod's types."""

import pytest

import keras_hvd


@pytest.mark.parametrize(
    "name",
    [
        *("mpi_built", "mpi_enabled", "gloo_built", "gloo_enabled"),
        *("cuda_built", "rocm_built", "ddl_built", "ccl_built"),
    ],
)
def test_answers_before_init_without_the_engine(name):
    assert getattr(keras_hvd, name)() is False


def test_nccl_is_a_version_number():
    version = keras_hvd.nccl_built()
    assert type(version) is int
    assert version == 0


def test_answers_of_a_job():
    keras_hvd.init()
    assert keras_hvd.mpi_threads_supported() is False
    assert keras_hvd.is_homogeneous() is True
