"""An MPI library's ranks in allreduce.py, under mpi4py.

MPI_Allreduce is the library's that mpi4py has loaded, and gets mpi4py's handles, but is
called and timed from C, so that no microsecond of Python counts against it.
"""

from __future__ import annotations

import ctypes
import os

import rank


def main() -> None:
    parser = rank.parser()
    parser.add_argument("--timed-calls", required=True, help="timed_calls.c, compiled")
    options = parser.parse_args()
    # Before the library looks at its cores, which it does when MPI is imported.
    rank.bind(options.cores, rank_by_environment())
    from mpi4py import MPI, __version__

    world = MPI.COMM_WORLD
    name, number = MPI.get_vendor()
    version = f"{name} {'.'.join(map(str, number))}, mpi4py {__version__}"
    session = rank.Session(options.socket, world.Get_rank(), world.Get_size(), version)
    time_calls = ctypes.CDLL(options.timed_calls).time_mpi_allreduce
    allreduce = ctypes.CDLL(loaded_library()).MPI_Allreduce
    handles = [ctypes.c_ssize_t(handle(each)) for each in (MPI.FLOAT, MPI.SUM, world)]
    in_place = ctypes.c_void_p(int(MPI.IN_PLACE))
    array = None

    def seconds(repeats: int) -> list[float]:
        measured = (ctypes.c_double * repeats)()
        data = ctypes.c_void_p(array.ctypes.data)
        code = time_calls(
            allreduce, in_place, data, array.size, *handles, repeats, measured
        )
        if code != 0:
            raise MPI.Exception(code)
        return list(measured)

    def measure(variant: str, size: int, repeats: int, warm_up: int) -> list[float]:
        nonlocal array
        if array is None or array.nbytes != size:
            array = rank.buffer(size)
            rank.require_sum(
                array, lambda: seconds(1), world.Get_rank(), world.Get_size()
            )
        seconds(warm_up)
        return seconds(repeats)

    session.serve(measure)


def rank_by_environment() -> int:
    """This rank, from Open MPI's launcher or from MPICH's."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])


def loaded_library() -> str:
    """The path of the MPI library in this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return next(line.split()[-1] for line in maps if "/libmpi.so" in line)


def handle(thing: object) -> int:
    """The C handle of a communicator, a type or an operation."""
    from mpi4py import MPI

    value = ctypes.string_at(MPI._addressof(thing), MPI._sizeof(thing))
    return int.from_bytes(value, "little")


if __name__ == "__main__":
    main()
