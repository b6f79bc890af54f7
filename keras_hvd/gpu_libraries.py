"""The libraries for tensors on GPUs: which NCCL, and what the engine does with it."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass

from keras_hvd import native, settings


@dataclass(frozen=True)
class Support:
    """What the engine finds on this machine for tensors on GPUs.

    Args:
        devices: Number of GPUs; 0 where there is no CUDA driver that can be used.
        nccl_version: 22304 for 2.23.4; 0 where no NCCL can be used.
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
    for folder in _packages_of_nccl():
        path = os.path.join(folder, "lib", "libnccl.so.2")
        if os.path.exists(path):
            return os.fsencode(path)
    return b""


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
    text = found.text.decode(errors="replace")
    if found.devices == 0:
        return Support(0, 0, text, "it is looked for where CUDA finds a GPU")
    cuda, _, nccl = text.partition("; ")
    return Support(found.devices, found.nccl_version, cuda, nccl)


def _packages_of_nccl() -> list[str]:
    """The folders of the package, which may be spread over several."""
    if importlib.util.find_spec("nvidia") is None:
        return []
    package = importlib.util.find_spec("nvidia.nccl")
    if package is None or package.submodule_search_locations is None:
        return []
    return list(package.submodule_search_locations)
