"""What this version is built with, under Horovod's names for such questions."""

from __future__ import annotations

from keras_hvd.gpu import gpu_libraries
from keras_hvd.runtime import basics


def mpi_enabled() -> bool:
    """Whether MPI coordinates the ranks.

    Returns:
        False: keras_hvd itself coordinates the ranks, also where MPI started them.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.mpi_enabled()
    False
    """
    return False


def mpi_built() -> bool:
    """Whether collectives may run over MPI.

    Returns:
        False: no part of this version uses MPI.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.mpi_built()
    False
    """
    return False


def gloo_enabled() -> bool:
    """Whether Gloo coordinates the ranks.

    Returns:
        False: the ranks are coordinated by keras_hvd itself.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.gloo_enabled()
    False
    """
    return False


def gloo_built() -> bool:
    """Whether collectives may run over Gloo.

    Returns:
        False: no part of this version uses Gloo.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.gloo_built()
    False
    """
    return False


def ddl_built() -> bool:
    """Whether collectives may run over IBM's DDL.

    Returns:
        False: no part of this version uses DDL.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.ddl_built()
    False
    """
    return False


def ccl_built() -> bool:
    """Whether collectives may run over Intel's oneCCL.

    Returns:
        False: no part of this version uses oneCCL.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.ccl_built()
    False
    """
    return False


def cuda_built() -> bool:
    """Whether collectives take tensors in the memory of CUDA GPUs here.

    Every build can; it opens CUDA at run time.

    Returns:
        True where the CUDA driver finds a GPU.

    Raises:
        LibraryError: keras_hvd's own library is missing or does not fit.

    Example:

    >>> import keras_hvd
    >>> type(keras_hvd.cuda_built())
    <class 'bool'>
    """
    return gpu_libraries.support().devices > 0


def rocm_built() -> bool:
    """Whether collectives take tensors in the memory of ROCm GPUs.

    Returns:
        False: no part of this version uses ROCm.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.rocm_built()
    False
    """
    return False


def nccl_built() -> int:
    """Which NCCL collectives of tensors on GPUs run over here.

    Every build can; it opens NCCL at run time.

    Returns:
        NCCL's version as a number, such as 22304 for 2.23.4; 0, which is false, where
        there is no GPU, or no NCCL that can be used.

    Raises:
        LibraryError: keras_hvd's own library is missing or does not fit.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.nccl_built() >= 0
    True
    """
    found = gpu_libraries.support()
    return found.nccl_version if found.devices > 0 else 0


def mpi_threads_supported() -> bool:
    """Whether several threads may call the MPI that the ranks use.

    Returns:
        False: no part of this version uses MPI.

    Raises:
        NotInitializedError: `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.mpi_threads_supported()
    False
    """
    basics.require_initialized("mpi_threads_supported")
    return False


def is_homogeneous() -> bool:
    """Whether every host has as many ranks.

    Returns:
        True: this version runs on one host.

    Raises:
        NotInitializedError: `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.is_homogeneous()
    True
    """
    basics.require_initialized("is_homogeneous")
    return basics.cross_size() == 1
