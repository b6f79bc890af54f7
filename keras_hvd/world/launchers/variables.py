"""Reads a process' place from the variables of its launcher, and checks it."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Mapping
from typing import NamedTuple

from keras_hvd.world.launchers.launcher import LaunchEnvironmentError, World
from keras_hvd.world.rendezvous import address

RENDEZVOUS = "KERAS_HVD_RENDEZVOUS"

# The engine's numbers of ranks have 32 bits.
TOO_MANY_RANKS = 2**31

# The engine's limit: the name is part of a socket's address.
_LONGEST_JOB_NAME = 80

_LONGEST_HOST_KEY = 256


class Names(NamedTuple):
    """The variables in which a launcher tells a rank's place.

    `local_size` is "" for one that does not tell it.
    """

    rank: str
    size: str
    local_rank: str
    local_size: str


def beginning(prefix: str) -> Names:
    """The variables with this prefix, and the endings of ours."""
    return Names(*(prefix + name.upper() for name in Names._fields))


def on_any_hosts(
    variables: Mapping[str, str], names: Names, job: str, rendezvous: str | None
) -> World:
    """The world that the variables of these names describe, on any hosts."""
    try:
        if rendezvous is not None:
            address.parse(rendezvous)
    except ValueError as error:
        raise LaunchEnvironmentError(f"{RENDEZVOUS}: {error}") from None
    total = integer(variables, names.size, 1, TOO_MANY_RANKS)
    here = 0
    if names.local_size:
        here = integer(variables, names.local_size, 1, TOO_MANY_RANKS)
    if here > total:
        raise LaunchEnvironmentError(
            f"{names.local_size}={here} and {names.size}={total} contradict each "
            "other: no host has more ranks than the job."
        )
    place = integer(variables, names.rank, 0, total)
    place_here = integer(variables, names.local_rank, 0, here or total)
    if total == 1:
        return World(0, 1, 0, 1, 0, 1, new_job())
    key = variables.get("KERAS_HVD_HOST_KEY") or None
    if key is not None and len(key) > _LONGEST_HOST_KEY:
        raise LaunchEnvironmentError(
            f"KERAS_HVD_HOST_KEY has {len(key)} characters, and may have "
            f"{_LONGEST_HOST_KEY}."
        )
    cross_rank, cross_size = _cross(variables, total)
    return World(
        *(place, total, place_here, here, cross_rank, cross_size),
        *(job_name(job), rendezvous, key),
    )


def _cross(variables: Mapping[str, str], total: int) -> tuple[int | None, int | None]:
    """This host's number and the number of hosts; None if the variables are not set."""
    names = "KERAS_HVD_CROSS_RANK", "KERAS_HVD_CROSS_SIZE"
    if not any(variables.get(name) for name in names):
        return None, None
    hosts = integer(variables, names[1], 1, total + 1)
    return integer(variables, names[0], 0, hosts), hosts


def many_hosts(evidence: str) -> LaunchEnvironmentError:
    return LaunchEnvironmentError(
        f"This job spans more than one host ({evidence}), and with this launcher "
        "keras_hvd runs on one host only: start it with khvdrun --nnodes on each host, "
        "or all ranks on one host."
    )


def on_one_host(
    variables: Mapping[str, str],
    names: Names,
    job: str,
    refuse: Callable[[str], LaunchEnvironmentError] = many_hosts,
) -> World:
    """The world that the variables of these names describe, if it is on one host."""
    total = integer(variables, names.size, 1, TOO_MANY_RANKS)
    here = integer(variables, names.local_size, 1, TOO_MANY_RANKS)
    if total != here:
        raise refuse(f"{names.size}={total}, but {names.local_size}={here}")
    this = integer(variables, names.rank, 0, total)
    this_here = integer(variables, names.local_rank, 0, here)
    if this != this_here:
        raise LaunchEnvironmentError(
            f"{names.rank}={this} and {names.local_rank}={this_here} contradict each "
            f"other: all {total} ranks are on one host, so both must be the same."
        )
    return World(this, total, this_here, here, 0, 1, job_name(job))


def is_one_host(variables: Mapping[str, str], names: Names) -> bool:
    return variables.get(names.size) == variables.get(names.local_size)


def new_job() -> str:
    """A name for a job of this process alone."""
    return f"single-{os.getpid()}-{uuid.uuid4().hex[:16]}"


def job_name(job: str) -> str:
    """The name, or a digest of it if it is too long for the engine.

    Args:
        job: a name of any length.

    Example:

    >>> job_name("openmpi-1891500033"), len(job_name(100 * "long"))
    ('openmpi-1891500033', 64)
    """
    if len(job.encode()) <= _LONGEST_JOB_NAME:
        return job
    return hashlib.sha256(job.encode()).hexdigest()


def integer(
    variables: Mapping[str, str], name: str, least: int, below: int | None = None
) -> int:
    text = text_of(variables, name)
    expected = f"an integer from {least}"
    if below is not None:
        expected += f" to {below - 1}"
    # int() also takes "1_0", " 1" and digits of other scripts.
    number = int(text) if text.isascii() and text.isdecimal() else -1
    if number < least or (below is not None and number >= below):
        raise LaunchEnvironmentError(f"{name}={text!r} is not {expected}.")
    return number


def text_of(variables: Mapping[str, str], name: str) -> str:
    text = variables.get(name)
    if text:
        return text
    was = "is not set" if text is None else "is empty"
    raise LaunchEnvironmentError(
        f"{name} {was}, although other variables of the same launcher are: start the "
        "program with khvdrun, mpirun or srun again, with their variables intact."
    )
