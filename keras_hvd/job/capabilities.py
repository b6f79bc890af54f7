"""The parts with which this version is built, under Horovod's names."""

from __future__ import annotations

import importlib.util
import sys

from keras_hvd.job import basics, gpu_libraries, native


def mpi_enabled() -> bool:
    """Whether MPI carries tensors between the hosts of this job.

    Returns:
        True where `KERAS_HVD_CPU_OPERATIONS=mpi` asks for it, under `mpirun` on several
        hosts. keras_hvd coordinates the ranks itself in any case.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.mpi_enabled()
    False
    """
    return basics.uses_mpi()


def mpi_built() -> bool:
    """Whether a job can use MPI here.

    Returns:
        True if mpi4py is installed. `khvdrun --check-build` shows which MPI it uses.

    Example:

    >>> import keras_hvd
    >>> type(keras_hvd.mpi_built())
    <class 'bool'>
    """
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Whether Gloo coordinates the ranks.

    Returns:
        False: keras_hvd coordinates the ranks itself.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.gloo_enabled()
    False
    """
    return False


def gloo_built() -> bool:
    """Whether collectives can use Gloo.

    Returns:
        False: this version does not use Gloo.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.gloo_built()
    False
    """
    return False


def ddl_built() -> bool:
    """Whether collectives can use IBM's DDL.

    Returns:
        False: this version does not use DDL.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.ddl_built()
    False
    """
    return False


def ccl_built() -> bool:
    """Whether collectives can use Intel's oneCCL.

    Returns:
        False: this version does not use oneCCL.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.ccl_built()
    False
    """
    return False


def cuda_built() -> bool:
    """Whether collectives accept tensors in the memory of CUDA GPUs here.

    Every build supports CUDA and opens it at run time.

    Returns:
        True if the CUDA driver finds a GPU.

    Raises:
        LibraryError: keras_hvd's own library is missing or does not fit.

    Example:

    >>> import keras_hvd
    >>> type(keras_hvd.cuda_built())
    <class 'bool'>
    """
    return gpu_libraries.support().devices > 0


def rocm_built() -> bool:
    """Whether collectives accept tensors in the memory of ROCm GPUs.

    Returns:
        False: this version does not use ROCm.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.rocm_built()
    False
    """
    return False


def nccl_built() -> int:
    """The version of NCCL that collectives of tensors on GPUs use here.

    Every build supports NCCL and opens it at run time.

    Returns:
        NCCL's version as a number, such as 22304 for 2.23.4; 0 without a GPU or a
        usable NCCL.

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
    """Whether several threads of this process may call MPI at once.

    Returns:
        True if mpi4py has initialized MPI here, with that thread level.

    Raises:
        NotInitializedError: `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.mpi_threads_supported()
    False
    """
    basics.require_initialized("mpi_threads_supported")
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    return mpi.Query_thread() == mpi.THREAD_MULTIPLE


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks.

    Returns:
        Whether it has; always on one host.

    Raises:
        NotInitializedError: `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.is_homogeneous()
    True
    """
    basics.require_initialized("is_homogeneous")
    return native.engine().khvd_is_homogeneous() == 1
