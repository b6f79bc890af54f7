"""Waits until the hosts that `mpirun` starts ranks on can be reached by ssh.

`mpirun` itself gives up at once. A pod's name may come seconds after the pod, and the
one that starts the job may be there before the others.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from keras_hvd.job import settings
from keras_hvd.launch.hosts import is_here
from keras_hvd.launch.options import Options
from keras_hvd.world.rendezvous.address import Address
from keras_hvd.world.rendezvous.nodes import NotMetError

# Between two tries.
_PAUSE_SECONDS = 0.5
_TRY_SECONDS = 5.0
# Of a program that only reads files.
_PATIENCE_SECONDS = 20

# By these, mpirun starts its helpers otherwise.
_OTHER_MEANS = re.compile(
    r"(?:OMPI_MCA|PRTE_MCA|HYDRA)_\w*(?:agent|LAUNCHER\w*|plm)"
    r"|LSB_JOBID|PBS_JOBID|COBALT_JOBID|PE_HOSTFILE|SLURM_JOB_ID"
)
_OTHER_AGENT = re.compile(r"agent|plm|launcher")


def wait_for_hosts(options: Options, environment: Mapping[str, str]) -> None:
    """Waits, within the start timeout, until the ssh port of each host answers.

    Raises NotMetError if one does not. Nothing is awaited where `mpirun` takes other
    means than ssh, or ssh another way than a connection from here.
    """
    variables = {**environment, **options.variables}
    if any(map(_OTHER_AGENT.search, options.mpi_args)):
        return
    if any(map(_OTHER_MEANS.fullmatch, variables)):
        return
    timeout = settings.init_timeout(variables)
    deadline = time.monotonic() + timeout
    for host in options.hosts:
        if not is_here(host.name):
            _wait_for(host.name, options.ssh_options, timeout, deadline)


def _wait_for(
    host: str, ssh_options: Sequence[str], timeout: float, deadline: float
) -> None:
    place = _place(host, ssh_options)
    if place is None:
        return
    is_told = False
    while why := _objection(place):
        if time.monotonic() > deadline:
            raise NotMetError(
                f"{host} could not be reached by ssh at {place} within {timeout:g} s: "
                f"{why}"
            )
        if not is_told:
            is_told = True
            print(
                f"khvdrun: {host} cannot be reached by ssh at {place} so far: {why}. "
                f"It tries for {timeout:g} s",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_PAUSE_SECONDS)


def _place(host: str, ssh_options: Sequence[str]) -> Address | None:
    """Where ssh connects for this name; None if it goes another way.

    Example:

    >>> str(_place("192.0.2.1", ["-p", "2222"]))
    '192.0.2.1:2222'
    """
    try:
        told = subprocess.run(
            ["ssh", *ssh_options, "-G", host],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_PATIENCE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = dict(line.partition(" ")[::2] for line in told.stdout.splitlines())
    if told.returncode != 0 or found.keys() & {"proxycommand", "proxyjump"}:
        return None
    return Address(found["hostname"], int(found["port"]))


def _objection(place: Address) -> str:
    """Why no ssh server answers there; "" if one does."""
    try:
        with socket.create_connection(place, _TRY_SECONDS) as connected:
            return "" if connected.recv(1) else "the connection was closed"
    except OSError as error:
        return error.strerror or str(error)
