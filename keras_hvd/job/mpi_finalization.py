"""Keeps a process whose job has failed out of MPI_Finalize, which waits for the dead.

mpi4py enters it after Python's end, and so after `shutdown`. A process that fails ends
instead, with the exit code of its script.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import sys
from typing import Any

from keras_hvd.job import native

# The argument that the script has given to sys.exit.
_given: Any = None


@functools.cache
def avoid_after_failure(family: str) -> None:
    """From now on, this process ends without MPI_Finalize if its job has failed.

    Args:
        family: "Open MPI" or "MPICH"; its mpi4py must be imported before.
    """
    # Python calls the last of these functions first.
    end = ctypes.cast(native.engine().khvd_end_process, ctypes.c_void_p)
    ctypes.pythonapi.Py_AtExit.argtypes = [ctypes.c_void_p]
    if ctypes.pythonapi.Py_AtExit(end) != 0:
        raise RuntimeError("Python takes no further function for its end")
    # Registered here because it must run after `shutdown`, which init registers later.
    atexit.register(_decide, family)
    sys.exit = _noting(sys.exit)


def _decide(family: str) -> None:
    engine = native.engine()
    # After a failure this process must not seem to have ended well: Python does not
    # tell the code of a SystemExit that the script has raised itself.
    code = _exit_code() or int(bool(engine.khvd_failure()))
    if code != 0:
        # Open MPI's mpirun ends the others when it sees a code. MPICH's does not, and
        # they may be in MPI_Finalize.
        aborting = _mpi_abort() if family == "MPICH" else (None, 0)
        engine.khvd_set_exit(code, *aborting)


def _mpi_abort() -> tuple[int | None, int]:
    """mpi4py's MPI_Abort, and the handle of its communicator of all ranks."""
    from mpi4py import MPI

    function = ctypes.CDLL(MPI.__file__).MPI_Abort
    return ctypes.cast(function, ctypes.c_void_p).value, MPI.COMM_WORLD.handle


def _exit_code() -> int:
    """The exit code of the script, which has ended."""
    # Python shows an exception that no script has caught, and sets this.
    if getattr(sys, "last_value", None) is not None:
        return 1
    if _given is None:
        return 0
    return _given & 0xFF if isinstance(_given, int) else 1


def _noting(sys_exit: Any) -> Any:
    """Wraps `sys.exit` to note its argument, which atexit functions do not learn."""

    @functools.wraps(sys_exit)
    def noting(code: Any = None, /) -> None:
        global _given
        _given = code
        sys_exit(code)

    return noting
