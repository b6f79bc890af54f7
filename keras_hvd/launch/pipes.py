"""Messages between a `khvdrun` and another host, over two pipes that ssh carries."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from typing import Any

from keras_hvd.world.rendezvous import event_loop
from keras_hvd.world.rendezvous.event_loop import READ, WRITE
from keras_hvd.world.rendezvous.messages import MessageError, pack

_CHUNK_BYTES = 1 << 16


class Pipes:
    """One end, in place of a `ProvenConnection`.

    Args:
        reading: a descriptor.
        writing: another one.

    Example:

    >>> (here, to_here), (there, to_there) = os.pipe(), os.pipe()
    >>> one, other = Pipes(here, to_there), Pipes(there, to_here)
    >>> async def talk():
    ...     await one.send({"rank": 1})
    ...     return await other.receive(100)
    >>> event_loop.EventLoop().run(talk())
    {'rank': 1}
    """

    def __init__(self, reading: int, writing: int):
        self._reading = reading
        self._writing = writing
        self._read = b""
        self.stream = self
        """Itself: what has a deadline, and is closed."""
        self.deadline = math.inf
        for each in (reading, writing):
            os.set_blocking(each, False)

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a message. Raises OSError."""
        # A login may have written something that has no line end.
        await write(self._writing, b"\n" + pack(message) + b"\n")

    async def receive(self, limit: int) -> dict[str, Any]:
        """Receives a message of at most `limit` bytes. Raises OSError, MessageError.

        What a login writes is the `text` of one.
        """
        while not (line := await self._line(limit)):
            pass
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            if isinstance(told, dict):
                return told
        return {"text": line.decode("latin-1") + "\n"}

    def close(self) -> None:
        """Ends it."""
        os.close(self._reading)
        os.close(self._writing)

    async def _line(self, limit: int) -> bytes:
        while b"\n" not in self._read:
            if len(self._read) > limit:
                raise MessageError(f"it has more than {limit} bytes")
            try:
                received = os.read(self._reading, _CHUNK_BYTES)
            except BlockingIOError:
                if await event_loop.ready(self._reading, READ, self.deadline):
                    continue
                raise TimeoutError(
                    errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)
                ) from None
            if not received:
                raise ConnectionResetError(errno.ECONNRESET, "it was closed")
            self._read += received
        line, _, self._read = self._read.partition(b"\n")
        return line


async def write(descriptor: int, content: bytes) -> None:
    """Writes all of it, when there is room. Raises OSError."""
    left = memoryview(content)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            await event_loop.ready(descriptor, WRITE, math.inf)
