"""The words between `khvdrun` and ranks that go on in another job without some of them.

Each rank connects once its job has failed. Both ends speak in lines of JSON:

    rank:     waits       it has left its job, and wants a place in the next one
    khvdrun:  join        its place there, which also calls off a place before
    rank:     joined, or could not
    khvdrun:  go          all have joined
    khvdrun:  end         there is no next job, and why
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from keras_hvd.world.rendezvous import unix_socket

VARIABLE = "KERAS_HVD_RENEWAL"
"""The variable of a rank that may go on in another job: NAME/NUMBER."""

_CHUNK_BYTES = 1 << 16


class Words:
    """One end of a connection.

    Example:

    >>> here, there = map(Words, socket.socketpair())
    >>> here.say("join", rank=1)
    >>> there.hear()
    {'word': 'join', 'rank': 1}
    >>> here._socket.send(b"GET / HTTP/1.1\\r\\n")
    16
    >>> there.hear()
    Traceback (most recent call last):
    ConnectionError: it speaks otherwise
    """

    def __init__(self, connected: socket.socket):
        self._socket = connected
        self._read = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def say(self, word: str, **rest: Any) -> None:
        """Sends a message. Raises OSError."""
        self._socket.sendall(json.dumps({"word": word, **rest}).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """Waits for the next message. Raises OSError, also at the end or nonsense."""
        while b"\n" not in self._read:
            if not self._receive():
                raise ConnectionError("it has ended")
        line, _, self._read = self._read.partition(b"\n")
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            if isinstance(told, dict) and "word" in told:
                return told
        raise ConnectionError("it speaks otherwise")

    def heard(self) -> Iterator[dict[str, Any]]:
        """The messages that have come, without a wait. Raises OSError like `hear`."""
        if not self._receive():
            raise ConnectionError("it has ended")
        while b"\n" in self._read:
            yield self.hear()

    def _receive(self) -> bool:
        received = self._socket.recv(_CHUNK_BYTES)
        self._read += received
        return bool(received)


def listen(name: str) -> socket.socket:
    """A socket for the ranks that were told this name. Raises OSError."""
    return unix_socket.listen(f"{name}/renewal")


def accept(listening: socket.socket) -> Words | None:
    """The rank that has connected; None if it is a process of another user."""
    connected, _ = listening.accept()
    if unix_socket.is_own(connected):
        return Words(connected)
    connected.close()
    return None


def connect(variables: Mapping[str, str]) -> Words:
    """Connects a rank with its `khvdrun`, and tells it who waits. Raises OSError."""
    name, _, number = variables[VARIABLE].rpartition("/")
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(b"\0" + f"{name}/renewal".encode())
        words = Words(connected)
        words.say("waits", number=int(number))
    except BaseException:
        connected.close()
        raise
    return words


def variable(name: str, number: int) -> dict[str, str]:
    """The variable for the rank that is started with this number."""
    return {VARIABLE: f"{name}/{number}"}


def take_place(place: Mapping[str, Any]) -> None:
    """Makes a `join` message this process' place in its next job."""
    rank, size = place["rank"], place["size"]
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    for name, value in values.items():
        os.environ[f"KERAS_HVD_{name}"] = os.environ[f"HOROVOD_{name}"] = str(value)
    os.environ["KERAS_HVD_JOB"] = place["job"]
