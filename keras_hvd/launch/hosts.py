"""Reads the hosts of a job, and the number of ranks that each may get: its slots."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_hvd.launch.usage import UsageError
from keras_hvd.world.rendezvous import network_interfaces

# LSF sets either.
_LSF_HOSTS = "LSB_MCPU_HOSTS"
_LSF_HOSTFILE = "LSB_DJOB_HOSTFILE"

# A file of other schedulers, and the variable of a job that the file is for.
_NODEFILES = {
    "PBS_NODEFILE": "PBS_JOBID",
    "COBALT_NODEFILE": "COBALT_JOBID",
    "PE_HOSTFILE": "JOB_ID",
}

# Shells, ssh and mpirun do not interpret any of these letters.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class HostSlots:
    """A host, and the number of ranks that it may get; None if unknown."""

    name: str
    slots: int | None


def from_option(text: str) -> list[HostSlots]:
    """The hosts that -H names. Raises UsageError.

    Example:

    >>> from_option("a:4,b")
    [HostSlots(name='a', slots=4), HostSlots(name='b', slots=None)]
    """
    return _distinct((_host(entry, "-H") for entry in text.split(",")), "-H")


def from_file(path: Path) -> list[HostSlots]:
    """The hosts of a file with lines such as `a slots=4`, `a:4` or `a`.

    Raises UsageError.
    """
    text = _read(str(path), "--hostfile")
    return from_lines(text, f"--hostfile {path}")


def from_lines(text: str, where: str) -> list[HostSlots]:
    """The hosts in lines such as `a slots=4`, `a:4` or `a`.

    Repeated lines are further slots. Raises UsageError, which says where the text is
    from.

    Example:

    >>> from_lines("a:4\\nb  # without a number\\n", "an example")
    [HostSlots(name='a', slots=4), HostSlots(name='b', slots=None)]
    >>> from_lines("a\\na\\n", "an example")
    [HostSlots(name='a', slots=2)]
    """
    found = _added_up(
        _host(_entry(line, f"{where}, line {number}"), f"{where}, line {number}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.partition("#")[0].strip()
    )
    if not found:
        raise UsageError(f"{where} names no host")
    return found


def from_scheduler(environment: Mapping[str, str]) -> list[HostSlots]:
    """The hosts that LSF, PBS, Cobalt or Grid Engine has given to this process' job.

    Raises UsageError.

    Example:

    >>> from_scheduler({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b 2"})
    [HostSlots(name='a', slots=4), HostSlots(name='b', slots=2)]
    >>> from_scheduler({})
    []
    """
    found = _from_scheduler(environment)
    if len(found) == 1 and is_here(found[0].name):
        # Whatever this host is called there.
        return [HostSlots("localhost", found[0].slots)]
    return found


def _from_scheduler(environment: Mapping[str, str]) -> list[HostSlots]:
    if "LSB_JOBID" in environment:
        return _from_lsf(environment)
    for name, job in _NODEFILES.items():
        if job in environment and environment.get(name):
            return _from_nodefile(name, environment[name])
    return []


def _from_lsf(environment: Mapping[str, str]) -> list[HostSlots]:
    words = environment.get(_LSF_HOSTS, "").split()
    if not words:
        path = environment.get(_LSF_HOSTFILE, "")
        return _from_nodefile(_LSF_HOSTFILE, path) if path else []
    if len(words) % 2:
        raise UsageError(
            f"{_LSF_HOSTS}={environment[_LSF_HOSTS]!r} is not hosts, each with a number"
        )
    pairs = zip(words[::2], words[1::2])
    return _distinct(
        (_host(f"{name}:{slots}", _LSF_HOSTS) for name, slots in pairs), _LSF_HOSTS
    )


def _from_nodefile(name: str, path: str) -> list[HostSlots]:
    """The hosts of a scheduler's file, which has a line for each of their slots.

    Grid Engine has their number behind the host, and its queues behind that.
    """
    lines = [line.split()[:2] for line in _read(path, name).splitlines()]
    where = f"{name}={path}"
    return _added_up(_host(":".join([*each, "1"][:2]), where) for each in lines if each)


def _read(path: str, where: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: cannot read {path!r}: {error}") from None


def are_here(hosts: Iterable[HostSlots]) -> bool:
    """Whether all of these are this host.

    Example:

    >>> are_here([HostSlots("localhost", 4)]), are_here([HostSlots("elsewhere", 4)])
    (True, False)
    """
    here = socket.gethostname()
    own = {"localhost", "127.0.0.1", here, here.partition(".")[0]}
    return all(host.name in own for host in hosts)


def is_here(name: str) -> bool:
    """Whether this is a name of this host, or one of its addresses.

    Example:

    >>> is_here("127.0.0.1"), is_here("nowhere.invalid")
    (True, False)
    """
    if are_here([HostSlots(name, None)]):
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(network_interfaces.name_of(str(one[4][0])) for one in found)


def check_slots(hosts: Sequence[HostSlots], ranks: int) -> None:
    """Raises UsageError if these hosts have fewer slots than there are ranks.

    Without a number, this host has as many as are wanted, and another one has one.
    """
    if are_here(hosts) and any(host.slots is None for host in hosts):
        return
    slots = sum(1 if host.slots is None else host.slots for host in hosts)
    if hosts and ranks > slots:
        raise UsageError(
            f"-np {ranks} asks for more processes than the {slots} slots given"
        )


def _entry(line: str, where: str) -> str:
    """A line of a hostfile in the form of -H."""
    name, *words = line.partition("#")[0].split()
    for word in words:
        if not word.startswith("slots="):
            raise UsageError(f"{where}: {word!r} is not slots=N")
    return ":".join([name, *(word.removeprefix("slots=") for word in words)])


def _host(entry: str, where: str) -> HostSlots:
    name, colon, slots = entry.partition(":")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {name!r} in {entry!r} is not the name of a host")
    if not colon:
        return HostSlots(name, None)
    if not (slots.isascii() and slots.isdecimal()) or int(slots) < 1:
        raise UsageError(
            f"{where}: {entry!r} does not give a number of slots, 1 or more"
        )
    return HostSlots(name, int(slots))


def _added_up(hosts: Iterable[HostSlots]) -> list[HostSlots]:
    """Each host once, with the slots of all its lines."""
    found: dict[str, HostSlots] = {}
    for host in hosts:
        before = found.get(host.name)
        slots = before and (before.slots or 1) + (host.slots or 1)
        found[host.name] = HostSlots(host.name, slots or host.slots)
    return [*found.values()]


def _distinct(hosts: Iterable[HostSlots], where: str) -> list[HostSlots]:
    found: dict[str, HostSlots] = {}
    for host in hosts:
        if host.name in found:
            raise UsageError(f"{where} names {host.name!r} twice: add up its slots")
        found[host.name] = host
    return [*found.values()]
