"""The functions of mpi4py's MPI by which the engine carries tensors."""

from __future__ import annotations

import ctypes
from typing import Any

from keras_hvd.job import native


def take(communicator: Any) -> native.Mpi:
    """The functions and handles of MPI, for a communicator that only the engine uses.

    Args:
        communicator: mpi4py's, of all ranks of the job in their order.
    """
    from mpi4py import MPI

    # Opens the library against which this extension is linked: the very one that it
    # uses.
    library = ctypes.CDLL(MPI.__file__)

    def address(name: str) -> int | None:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value

    return native.Mpi(
        isend=address("MPI_Isend"),
        issend=address("MPI_Issend"),
        irecv=address("MPI_Irecv"),
        test=address("MPI_Test"),
        error_string=address("MPI_Error_string"),
        communicator=_signed(communicator.handle),
        byte=_signed(MPI.BYTE.handle),
        handles_are_ints=MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int),
        status_bytes=MPI._sizeof(MPI.Status),
    )


def _signed(handle: int) -> int:
    """Converts a handle to a signed integer: mpi4py does not show negative ones."""
    return ctypes.c_ssize_t(handle).value
