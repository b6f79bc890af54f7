"""The words between `khvdrun` and ranks that go on in another job, with fewer or more.

Each rank is connected as long as it runs a function of `elastic.run`. Both ends speak
in lines of JSON:

    rank:     here        it runs the function
    khvdrun:  others      new ranks wait for a place in its job
    rank:     waits       it has left its job, and wants a place in the next one
    khvdrun:  join        its place there, which also calls off a place before
    rank:     joined, or could not
    khvdrun:  go          all have joined
    khvdrun:  end         there is no next job, and why
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keras_hvd.world.rendezvous import unix_socket

VARIABLE = "KERAS_HVD_RENEWAL"
"""The variable of a rank that may go on in another job."""

_CHUNK_BYTES = 1 << 16
_PREFIXES = "KERAS_HVD", "HOROVOD"


@dataclass(frozen=True)
class Renewal:
    """What a rank is told at its start about other jobs to come.

    Args:
        name: the socket's.
        number: the rank's, as it was started.
        gains: whether new ranks may join the job.
        is_new: whether this one is new itself, and still alone.

    Example:

    >>> variables = Renewal("khvdrun-7", 2, gains=True, is_new=True).variables()
    >>> variables
    {'KERAS_HVD_RENEWAL': 'khvdrun-7/2/gains/new'}
    >>> of(variables)
    Renewal(name='khvdrun-7', number=2, gains=True, is_new=True)
    >>> of({})
    """

    name: str
    number: int
    gains: bool = False
    is_new: bool = False

    def variables(self) -> dict[str, str]:
        words = ["gains"] * self.gains + ["new"] * self.is_new
        return {VARIABLE: "/".join([self.name, str(self.number), *words])}


def of(variables: Mapping[str, str]) -> Renewal | None:
    """What these variables tell; None for a rank of a job that keeps its ranks."""
    if VARIABLE not in variables:
        return None
    name, number, *words = variables[VARIABLE].split("/")
    return Renewal(name, int(number), "gains" in words, "new" in words)


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

    def are_there(self) -> bool:
        """Whether something is to be heard without a wait, be it the end."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return bool(self._read)
        return True

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


def connect(renewal: Renewal, turn: int) -> Words:
    """Connects a rank with its `khvdrun`, and tells it who is here. Raises OSError.

    `turn` is the number of the function that the rank runs, from 1.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(b"\0" + f"{renewal.name}/renewal".encode())
        words = Words(connected)
        words.say("here", number=renewal.number, turn=turn)
    except BaseException:
        connected.close()
        raise
    return words


def place_of(rank: int, size: int, job: str) -> dict[str, str]:
    """The variables of a rank's place in a job on this host.

    Example:

    >>> place_of(0, 2, "khvdrun-7")["KERAS_HVD_LOCAL_SIZE"]
    '2'
    """
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    names = [(f"{prefix}_{each}", each) for prefix in _PREFIXES for each in values]
    return {**{name: str(values[each]) for name, each in names}, "KERAS_HVD_JOB": job}


def take_place(renewal: Renewal, place: Mapping[str, Any]) -> None:
    """Makes a `join` message this process' place in its next job."""
    os.environ.update(place_of(place["rank"], place["size"], place["job"]))
    os.environ.update(dataclasses.replace(renewal, is_new=False).variables())
