"""Finds this process' rank and its job's size in its launcher's variables.

Each launcher has its own variables. Without any of them, the process is a world of size
1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from keras_hvd.job import settings
from keras_hvd.world import unread_launchers
from keras_hvd.world.launchers import (
    flux,
    horovodrun,
    khvdrun,
    mpirun,
    pytorch,
    srun,
    torchrun,
)
from keras_hvd.world.launchers.launcher import LaunchEnvironmentError, Launcher, World
from keras_hvd.world.launchers.variables import new_job
from keras_hvd.world.unread_launchers import Sign

# The first one whose variables are set has started this process: launchers may nest.
_LAUNCHERS: tuple[Launcher, ...] = (
    khvdrun,
    mpirun.OPEN_MPI,
    mpirun.MPICH,
    mpirun.MPIRUN_RSH,
    mpirun.JSRUN,
    mpirun.PALS,
    horovodrun,
    srun,
    flux,
    torchrun,
    pytorch,
)


def world(environment: Mapping[str, str] | None = None) -> World:
    """Returns the rank, size and job that this process was launched with.

    Args:
        environment: The variables to read; by default those of this process.

    Returns:
        The `World` that the launcher described. Without one that keras_hvd knows, a
        world of size 1 with a new job of its own.

    Raises:
        LaunchEnvironmentError: A variable is missing, malformed or contradicts another
            one, or the job spans more than one host, without a place to meet.

    Example:
        >>> from keras_hvd import environment
        >>> environment.world({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0",
        ...     "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        ...     "PMIX_NAMESPACE": "1891500033"})  # doctest: +NORMALIZE_WHITESPACE
        World(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1,
            job='openmpi-1891500033', rendezvous=None, host_key=None, way=None)
    """
    variables = os.environ if environment is None else environment
    launcher = _launcher(variables)
    if launcher is None:
        return World(0, 1, 0, 1, 0, 1, new_job())
    return launcher.world(variables)


def check_size(size: int, environment: Mapping[str, str] | None = None) -> Sign | None:
    """Checks a job's size against the required size, or against signs of another size.

    Args:
        size: The number of processes of the job that this one joins.
        environment: The variables to read; by default those of this process.

    Returns:
        The sign that there are others, which another launcher has started: this process
        would be alone by mistake. None if there is no sign, or if
        `KERAS_HVD_REQUIRE_SIZE` says that it is none.

    Raises:
        LaunchEnvironmentError: `KERAS_HVD_REQUIRE_SIZE` is another size.
        ValueError: `KERAS_HVD_REQUIRE_SIZE` is no size.

    Example:
        >>> from keras_hvd import environment
        >>> environment.check_size(1, {"SKYPILOT_NUM_NODES": "2"}).said
        'SKYPILOT_NUM_NODES=2 says that SkyPilot has started 2 nodes'
        >>> environment.check_size(4, {"KERAS_HVD_REQUIRE_SIZE": "4"})
    """
    variables = os.environ if environment is None else environment
    required = settings.required_size(variables)
    if required == size:
        return None
    sign = unread_launchers.find(variables) if _launcher(variables) is None else None
    if required == 0:
        return sign
    raise LaunchEnvironmentError(
        f"KERAS_HVD_REQUIRE_SIZE={required}, but this job has the size {size}"
        + (f": {sign}." if sign else ". Start it with so many ranks, or unset that.")
    )


def _launcher(variables: Mapping[str, str]) -> Launcher | None:
    """The launcher of the process that has these variables; None if it has none."""
    return next((each for each in _LAUNCHERS if each.is_here(variables)), None)
