"""The words between `khvdrun` and ranks that go on in another job, with fewer or more.

Each rank is connected as long as it runs a function of `elastic.run`. Both ends speak
in lines of JSON:

    rank:     meets       it joins the first job: rank 0's address, if it is that
    khvdrun:  at          the address of rank 0
    rank:     here        it runs the function
    khvdrun:  others      new ranks wait for a place in its job
    rank:     waits       it has left its job, and wants a place in the next one
    khvdrun:  join        its place there, which also calls off a place before
    khvdrun:  late        all wait for one, which does not come: who hears it stops
    rank:     joined, or could not
    khvdrun:  go          all have joined
    khvdrun:  leave       the others go on without it
    khvdrun:  end         there is no next job, and why
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keras_hvd.exceptions import RendezvousError
from keras_hvd.job import settings
from keras_hvd.job.later_jobs import VARIABLE
from keras_hvd.world.launchers.variables import RENDEZVOUS
from keras_hvd.world.rendezvous import address, listener, unix_socket
from keras_hvd.world.rendezvous.event_loop import EventLoop

_CHUNK_BYTES = 1 << 16

# The variables of the place that this process took last.
_taken: dict[str, str] = {}


class Left(SystemExit):
    """Ends a rank that is to leave its job, without an error."""


@dataclass(frozen=True)
class Renewal:
    """What a rank is told at its start about other jobs to come.

    Args:
        name: the socket's.
        number: the rank's, as it was started.
        slot: its number among those of its host.
        address: of its host, if there are others; "" if there are none.
        gains: whether new ranks may join the job.
        is_new: whether this one is new itself, and still alone.
        rank_to_come: the one that it is about to have, if it is new.
        generation: the number of the job that it is in, among those that ranks of this
            `khvdrun` have gone on in, from 1.

    Example:

    >>> variables = Renewal("khvdrun-7", 2, 0, is_new=True, rank_to_come=3).variables()
    >>> of(variables)
    Renewal(name='khvdrun-7', number=2, slot=0, address='', gains=False, is_new=True, \
rank_to_come=3, generation=1)
    >>> of({})
    """

    name: str
    number: int
    slot: int
    address: str = ""
    gains: bool = False
    is_new: bool = False
    rank_to_come: int = 0
    generation: int = 1

    def variables(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(vars(self))}


def of(variables: Mapping[str, str]) -> Renewal | None:
    """What these variables tell; None for a rank of a job that keeps its ranks."""
    if VARIABLE not in variables:
        return None
    return Renewal(**json.loads(variables[VARIABLE]))


class Words:
    """One end of a connection.

    Example:

    >>> here, there = map(Words, socket.socketpair())
    >>> here.say("here", number=1)
    >>> there.hear()
    {'word': 'here', 'number': 1}
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
        """Ends it, although a forked process may have it too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
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
        with contextlib.suppress(BlockingIOError):
            if not self._receive(socket.MSG_DONTWAIT):
                raise ConnectionError("it has ended")
        while b"\n" in self._read:
            yield self.hear()

    def _receive(self, flags: int = 0) -> bool:
        received = self._socket.recv(_CHUNK_BYTES, flags)
        self._read += received
        return bool(received)


def listen(name: str) -> socket.socket:
    """A socket for the ranks that were told this name. Raises OSError."""
    return unix_socket.listen(f"{name}/renewal")


def accept(listening: socket.socket) -> Words | None:
    """The rank that has connected; None without one, or for another user's process."""
    try:
        connected, _ = listening.accept()
    except BlockingIOError:
        return None
    if unix_socket.is_own(connected):
        return Words(connected)
    connected.close()
    return None


def connect(renewal: Renewal, turn: int) -> Words:
    """Connects a rank with its `khvdrun`, and tells it who is here. Raises OSError.

    `turn` is the number of the function that the rank runs, from 1.
    """
    words = Words(dial(renewal.name))
    try:
        words.say("here", number=renewal.number, turn=turn)
    except BaseException:
        words.close()
        raise
    return words


def dial(name: str) -> socket.socket:
    """A connection with who listens at this name. Raises OSError."""
    connected = EventLoop().run(unix_socket.connect(f"{name}/renewal", math.inf))
    connected.setblocking(True)
    return connected


def offer(renewal: Renewal) -> str:
    """Where the ranks can meet if this one is rank 0; "" on one host.

    Raises RendezvousError.
    """
    return renewal.address and str(listener.listen_early(renewal.address))


def withdraw(offered: str) -> None:
    """Stops listening there, unless this process is rank 0 and they have met."""
    if offered:
        for listening in listener.take_early(address.parse(offered)):
            listening.close()


def learn_where_to_meet() -> None:
    """Sets where the ranks of the first job meet, if they are on several hosts.

    Raises RendezvousError if `khvdrun` does not tell it within the time for joining.
    """
    told = of(os.environ)
    if told is None or not told.address or told.is_new or RENDEZVOUS in os.environ:
        return
    is_first = os.environ["KERAS_HVD_RANK"] == "0"
    timeout = settings.init_timeout()
    try:
        with contextlib.closing(dial(told.name)) as dialled:
            dialled.settimeout(timeout)
            words = Words(dialled)
            words.say("meets", at=offer(told) if is_first else "")
            os.environ[RENDEZVOUS] = words.hear()["at"]
    except OSError as error:
        raise RendezvousError(
            f"rank {os.environ['KERAS_HVD_RANK']} on {socket.gethostname()} does not "
            f"learn from khvdrun where rank 0 is, within {timeout:g} s: {error}"
        ) from None


def take_place(renewal: Renewal, variables: Mapping[str, str], generation: int) -> None:
    """Makes what a `join` message tells this process' place in its next job."""
    own = dataclasses.replace(renewal, is_new=False, generation=generation)
    _taken.update(variables)
    _taken.update(own.variables())
    os.environ.update(_taken)


def taken() -> Mapping[str, str]:
    """The variables of the place that this process took last; none of its first.

    The environment has them too, as long as the user's script does not change it.
    """
    return _taken
