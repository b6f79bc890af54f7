"""Sockets between processes of a host and a user, with names that leave no files."""

from __future__ import annotations

import os
import socket
import struct
import time

from keras_hvd.world.rendezvous import event_loop
from keras_hvd.world.rendezvous.event_loop import READ

_CREDENTIALS = struct.Struct("iII")  # a process, its user and group
_PAUSE_SECONDS = 0.01


def listen(name: str) -> socket.socket:
    """A socket that others can reach by its name. Raises OSError.

    Example:

    >>> listen("a name of this example").getsockname()
    b'\\x00a name of this example'
    """
    listening = _make()
    try:
        listening.bind(_address(name))
        listening.listen(socket.SOMAXCONN)
    except BaseException:
        listening.close()
        raise
    return listening


async def accept(listening: socket.socket, deadline: float) -> socket.socket | None:
    """The next connection of a process of this user; None after the deadline.

    Example:

    >>> with listen("a name of this example") as listening:
    ...     event_loop.EventLoop().run(accept(listening, time.monotonic())) is None
    True
    """
    while await event_loop.ready(listening, READ, deadline):
        try:
            accepted, _ = listening.accept()
        except OSError:
            # A process that asked may have gone.
            continue
        accepted.setblocking(False)
        if is_own(accepted):
            return accepted
        accepted.close()
    return None


async def connect(name: str, deadline: float) -> socket.socket:
    """Connects to a process of this user that listens at a name. Raises OSError.

    Example:

    >>> event_loop.EventLoop().run(connect("nobody has this name", deadline=0))
    Traceback (most recent call last):
    ConnectionRefusedError: [Errno 111] Connection refused
    """
    connected = _make()
    try:
        while True:
            try:
                connected.connect(_address(name))
                break
            except BlockingIOError:
                # Too many ask at once.
                if time.monotonic() > deadline:
                    raise TimeoutError("it does not answer") from None
                await event_loop.pause(_PAUSE_SECONDS)
        if not is_own(connected):
            raise PermissionError("it is a process of another user")
    except BaseException:
        connected.close()
        raise
    return connected


def _make() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


def _address(name: str) -> bytes:
    """An address in the abstract namespace."""
    return b"\0" + name.encode()


def is_own(connected: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user."""
    credentials = connected.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    return _CREDENTIALS.unpack(credentials)[1] == os.geteuid()
