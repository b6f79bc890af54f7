"""Tells `khvdrun` that one of its processes has called `keras_hvd.init`.

One datagram goes to a socket without a file, which ends with khvdrun. Other launchers
have no such socket, and no process waits for an answer.
"""

from __future__ import annotations

import contextlib
import socket


def listen(job: str, first_rank: int) -> socket.socket:
    """A socket that becomes readable when a rank of this host joins. Raises OSError.

    `first_rank` is the lowest of the ranks that this `khvdrun` starts.

    Example:

    >>> with listen("a job of this example", 0) as listening:
    ...     tell("a job of this example", 0)
    ...     listening.recv(1)
    b''
    """
    listening = _make()
    try:
        listening.bind(_address(job, first_rank))
    except BaseException:
        listening.close()
        raise
    return listening


def tell(job: str, first_rank: int) -> None:
    """Tells the `khvdrun` that has started this rank, if there is one.

    Example:

    >>> tell("a job without a khvdrun", 0)
    """
    with contextlib.suppress(OSError), _make() as telling:
        telling.sendto(b"", _address(job, first_rank))


def _make() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


def _address(job: str, first_rank: int) -> bytes:
    """An address in the abstract namespace; names there have up to 107 bytes."""
    return b"\0" + f"{job[:64]}/joined/{first_rank}".encode()
