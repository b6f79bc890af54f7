"""The NCCL and NVTX that are taken, and the words about one that cannot be used."""

import os
import subprocess
import sys

import pytest

from keras_hvd.job import gpu_libraries


@pytest.fixture
def package(tmp_path):
    """A folder with the package that nvidia-nccl-cu12 and -cu13 bring, and its file."""
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").touch()
    (tmp_path / "nvidia" / "nccl" / "__init__.py").touch()
    library = folder / "libnccl.so.2"
    library.touch()
    return tmp_path, library


def run(program: str, **variables: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **variables},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


FIND = (
    "import sys; from keras_hvd.job import gpu_libraries; "
    "print(gpu_libraries.packaged_nccl().decode()); "
    "assert 'tensorflow' not in sys.modules"
)


def test_finds_nccl_of_the_package(package):
    folder, library = package
    assert run(FIND, PYTHONPATH=str(folder)) == str(library)


def test_a_package_without_the_library_is_none(package):
    folder, library = package
    library.unlink()
    assert run(FIND, PYTHONPATH=str(folder)) == ""


def test_other_packages_of_nvidia_are_none(package):
    folder, library = package
    for each in (library, library.parent, library.parent.parent / "__init__.py"):
        each.rmdir() if each.is_dir() else each.unlink()
    library.parent.parent.rmdir()
    assert run(FIND, PYTHONPATH=str(folder)) == ""


FIND_NVTX = (
    "from keras_hvd.job import gpu_libraries; "
    "print(gpu_libraries.packaged_nvtx().decode())"
)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["nvtx/lib/libnvtx3interop.so.1"], "nvtx/lib/libnvtx3interop.so.1"),
        (["nvtx/lib/libnvToolsExt.so.1"], "nvtx/lib/libnvToolsExt.so.1"),
        (["cu13/lib/libnvtx3interop.so.1"], "cu13/lib/libnvtx3interop.so.1"),
        (
            ["cu13/lib/libnvtx3interop.so.1", "nvtx/lib/libnvToolsExt.so.1"],
            "nvtx/lib/libnvToolsExt.so.1",
        ),
        (["nvtx/lib/libnvtx.so.1", "cu13/lib/libcudart.so.13"], None),
    ],
)
def test_finds_nvtx_of_the_packages(tmp_path, files, found):
    for file in files:
        path = tmp_path / "nvidia" / file
        path.parent.mkdir(parents=True)
        path.touch()
    expected = str(tmp_path / "nvidia" / found) if found else ""
    assert run(FIND_NVTX, PYTHONPATH=str(tmp_path)) == expected


def test_a_driver_that_is_none_is_named(tmp_path, monkeypatch):
    library = tmp_path / "libcuda.so.1"
    monkeypatch.setenv("KERAS_HVD_CUDA_LIBRARY", str(library))
    found = gpu_libraries.support()
    assert found.devices == 0
    is_there = found.nccl_version > 0
    assert found.nccl.startswith("NCCL " if is_there else "there is no GPU that needs")
    assert found.cuda == f"there is no CUDA driver in {library}"
    library.write_text("no library")
    gpu_libraries._support.cache_clear()
    assert f"{library} cannot be opened: " in gpu_libraries.support().cuda


SAID_OF_NCCL = (
    "from keras_hvd.job import gpu_libraries; print(gpu_libraries.support().nccl)"
)


def test_a_package_whose_library_is_broken_is_named_without_a_gpu_too(package):
    folder, library = package
    no_gpu = {"KERAS_HVD_CUDA_LIBRARY": "/none/libcuda.so.1"}
    said = run(SAID_OF_NCCL, PYTHONPATH=str(folder), **no_gpu)
    assert said.startswith(f"{library} cannot be opened: ")
