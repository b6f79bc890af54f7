"""Messages between a `khvdrun` and a rank that it has started on another host.

Both ends speak over pipes, which ssh carries. A rank's output, what it says to
`khvdrun`, and how it ended are all on one of them, so each message has a kind.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import struct
import threading

_HEADER = struct.Struct("!cI")
_CHUNK_BYTES = 1 << 16
_ALIVE_SECONDS = 1.0
# For a login on a host.
_GREETING_SECONDS = 120.0
# Of text that a login writes before the first message.
_MOST_GREETING_BYTES = 1 << 16
_GREETING = b"\0keras_hvd\0"


class Kind(bytes, enum.Enum):
    """What a message has."""

    VERSION = b"v"  # keras_hvd's there, which is the first message
    BEGIN = b"b"  # the rank's command and place, in JSON
    SIGNAL = b"s"  # a signal's number
    STDOUT = b"o"
    STDERR = b"e"
    CONNECTED = b"c"  # the rank to its khvdrun
    WORDS = b"w"  # of that connection, in either direction
    CLOSED = b"x"  # that connection
    ENDED = b"q"  # the rank's wait status
    ALIVE = b"a"  # nothing, so that silence tells of a host that is gone


class Frames:
    """One end.

    Args:
        reading: a descriptor.
        writing: another one.
        patience: the seconds without a message after which the other end is gone.

    Example:

    >>> reading, writing = os.pipe()
    >>> Frames(-1, writing, 60.0).send(Kind.STDOUT, b"a line")
    >>> kind, content = Frames(reading, -1, 60.0).receive()
    >>> kind.name, content
    ('STDOUT', b'a line')
    """

    def __init__(self, reading: int, writing: int, patience: float):
        self._reading = reading
        self._writing = writing
        self._patience = _GREETING_SECONDS
        self._later_patience = patience
        self._read = b""
        self._one_at_a_time = threading.Lock()

    def greet(self) -> None:
        """Shows the other end where messages begin. Raises OSError."""
        _write(self._writing, _GREETING)

    def await_greeting(self) -> bytes:
        """Waits for the first message; returns what came before. Raises EOFError."""
        while _GREETING not in self._read:
            if len(self._read) > _MOST_GREETING_BYTES:
                raise EOFError
            self._receive()
        before, _, self._read = self._read.partition(_GREETING)
        return before

    def show_life(self) -> None:
        """From now on, both ends send something each second."""
        self._patience = self._later_patience
        threading.Thread(target=self._show_life, daemon=True).start()

    def _show_life(self) -> None:
        never = threading.Event()
        with contextlib.suppress(OSError):
            while not never.wait(_ALIVE_SECONDS):
                self.send(Kind.ALIVE)

    def send(self, kind: Kind, content: bytes = b"") -> None:
        """Sends a message. Raises OSError."""
        with self._one_at_a_time:
            _write(self._writing, _HEADER.pack(kind.value, len(content)) + content)

    def receive(self) -> tuple[Kind, bytes]:
        """Waits for a message. Raises EOFError at the end, and after long silence."""
        kind, size = _HEADER.unpack(self._exactly(_HEADER.size))
        return Kind(kind), self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        while len(self._read) < size:
            self._receive()
        content, self._read = self._read[:size], self._read[size:]
        return content

    def _receive(self) -> None:
        received = b""
        is_there, _, _ = select.select([self._reading], [], [], self._patience)
        if is_there:
            received = os.read(self._reading, _CHUNK_BYTES)
        if not received:
            raise EOFError
        self._read += received


def _write(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
