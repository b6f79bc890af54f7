"""Finds the libraries for GPUs, and asks the engine for its support of NCCL."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass

from keras_hvd.job import native, settings

# One of these exists if a driver is loaded: on Linux, or on Linux under Windows.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")


@dataclass(frozen=True)
class Support:
    """The engine's support for tensors on GPUs on this machine."""

    devices: int  # number of GPUs; 0 without a usable CUDA driver
    nccl_version: int  # 22304 for 2.23.4, also without a GPU; 0 without a usable NCCL
    cuda: str  # for people: the driver and its devices, or why it cannot be used
    nccl: str


def driver_is_loaded() -> bool:
    """Whether this machine has an NVIDIA driver, without calling it."""
    return any(map(os.path.exists, _DEVICE_FILES))


def packaged_nccl() -> bytes:
    """Path of NCCL in nvidia-nccl-cu12 or nvidia-nccl-cu13, if installed, or "".

    It imports neither TensorFlow nor CUDA.
    """
    return _find("nvidia.nccl", "libnccl.so.2")


def packaged_nvtx() -> bytes:
    """Path of NVTX, for profilers, in nvidia-nvtx-cu12 or nvidia-nvtx, or ""."""
    # Newer and older versions for CUDA 12; CUDA 13.
    return (
        _find("nvidia.nvtx", "libnvtx3interop.so.1")
        or _find("nvidia.nvtx", "libnvToolsExt.so.1")
        or _find("nvidia.cu13", "libnvtx3interop.so.1")
    )


def support() -> Support:
    """Opens the libraries as `init` does, and looks for GPUs. Libraries stay open.

    Example:

    >>> support().devices >= 0
    True
    """
    read = settings.read()
    return _support(read.cuda_library, read.nccl_library or packaged_nccl())


@functools.cache
def _support(cuda_library: bytes, nccl_library: bytes) -> Support:
    found = native.gpu_support(native.engine(), cuda_library, nccl_library)
    cuda, _, nccl = found.text.decode(errors="replace").partition("\n")
    # Users should not install it without need.
    if found.devices == found.nccl_version == 0 and not nccl_library:
        nccl = "there is no GPU that needs it"
    return Support(found.devices, found.nccl_version, cuda, nccl)


def _find(package: str, library: str) -> bytes:
    """The path of a library in one of NVIDIA's packages; empty if there is none."""
    for folder in _folders(package):
        path = os.path.join(folder, "lib", library)
        if os.path.exists(path):
            return os.fsencode(path)
    return b""


def _folders(package: str) -> list[str]:
    """The folders of one of NVIDIA's packages, which may have several."""
    if importlib.util.find_spec("nvidia") is None:
        return []
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is None:
        return []
    return list(found.submodule_search_locations)
