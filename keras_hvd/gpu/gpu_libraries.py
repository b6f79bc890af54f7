"""The libraries for GPUs: which NCCL and NVTX, and what the engine does with NCCL."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass

from keras_hvd.runtime import native, settings


@dataclass(frozen=True)
class Support:
    """What the engine finds on this machine for tensors on GPUs.

    Args:
        devices: Number of GPUs; 0 where there is no CUDA driver that can be used.
        nccl_version: 22304 for 2.23.4, also without a GPU; 0 where no NCCL can be used.
        cuda: For people: the driver and its devices, or why it cannot be used.
        nccl: The same of NCCL.
    """

    devices: int
    nccl_version: int
    cuda: str
    nccl: str


def packaged_nccl() -> bytes:
    """NCCL of this Python environment, from nvidia-nccl-cu12 or nvidia-nccl-cu13.

    Neither TensorFlow nor CUDA is imported for it.

    Returns:
        Its path; empty if there is none.

    Example:

    >>> packaged_nccl().endswith((b"libnccl.so.2", b""))
    True
    """
    return _find("nvidia.nccl", "libnccl.so.2")


def packaged_nvtx() -> bytes:
    """NVTX of this Python environment, from nvidia-nvtx-cu12 or nvidia-nvtx.

    Nothing but a profiler makes use of it.

    Returns:
        Its path; empty if there is none.

    Example:

    >>> packaged_nvtx().endswith((b".so.1", b""))
    True
    """
    # For CUDA 12 of newer and of older versions; for CUDA 13.
    return (
        _find("nvidia.nvtx", "libnvtx3interop.so.1")
        or _find("nvidia.nvtx", "libnvToolsExt.so.1")
        or _find("nvidia.cu13", "libnvtx3interop.so.1")
    )


def support() -> Support:
    """Opens the libraries as `init` has the engine do, and looks for GPUs.

    Returns:
        What was found. Libraries that were opened stay open.

    Raises:
        LibraryError: keras_hvd's own library is missing or does not fit.
        ValueError: an environment variable of keras_hvd is malformed.

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
    # Nobody is to install it for nothing.
    if found.devices == found.nccl_version == 0 and not nccl_library:
        nccl = "there is no GPU that needs it"
    return Support(found.devices, found.nccl_version, cuda, nccl)


def _find(package: str, library: str) -> bytes:
    """The path of a library of one of NVIDIA's packages; empty if there is none."""
    for folder in _folders(package):
        path = os.path.join(folder, "lib", library)
        if os.path.exists(path):
            return os.fsencode(path)
    return b""


def _folders(package: str) -> list[str]:
    """The folders of a package of NVIDIA's, which may be spread over several."""
    if importlib.util.find_spec("nvidia") is None:
        return []
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is None:
        return []
    return list(found.submodule_search_locations)
