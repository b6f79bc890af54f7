"""What the `khvdrun` of a host and that which it has joined say to each other.

host:     hello     how many slots it has; and, to a service that was started again,
                    the last record, and how its ranks are
          leaves    its ranks are to leave at a commit
other:    refused   why the host cannot join
          end       the job's exit code, and why

A first host besides:

first:    reach     connect to a tunnel, and run a command

And a membership service:

service:  patience  how long a host waits for another service
          name      the host's
          record    what another service needs to go on from here
          start     a rank, with its variables
          kill      a rank
          tell      a word for a rank
          at        where the ranks of the first job meet
          fails     the ranks end if they do not do so by themselves
          stops     they end now
host:     meets     a rank joins the first job: rank 0's address, if it is that
          said      a word of a rank
          gone      a rank runs the function no more
          ended     a rank has ended, and how
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from keras_hvd.world.rendezvous import event_loop
from keras_hvd.world.rendezvous.connection import ProvenConnection
from keras_hvd.world.rendezvous.event_loop import EventLoop

PATIENCE_SECONDS = 15.0
"""Without a sign of life, the other end is gone."""

# Between two of them, in both directions.
_ALIVE_SECONDS = 2.0

# A record names all ranks.
_MOST_BYTES = 1 << 24


class Talk:
    """One end of such a connection. Both show that they are alive."""

    def __init__(self, loop: EventLoop, proven: ProvenConnection):
        self._loop = loop
        self._proven = proven
        self._to_say: list[dict[str, Any]] = []
        self._alive = loop.start(self._show_life())

    @property
    def own_address(self) -> str:
        """The IP address of this host."""
        return self._proven.stream.socket.getsockname()[0]

    @property
    def is_silent(self) -> bool:
        """Whether everything has been sent."""
        return not self._to_say

    def say(self, **message: Any) -> None:
        """Sends a message, after those before. Who hears notices a loss."""
        self._to_say.append(message)
        if len(self._to_say) == 1:
            self._loop.start(self._send())

    async def hear(self) -> dict[str, Any]:
        """Waits for the next message. Raises OSError, MessageError."""
        self._proven.stream.deadline = time.monotonic() + PATIENCE_SECONDS
        return await self._proven.receive(_MOST_BYTES)

    def close(self) -> None:
        """Ends it."""
        self._loop.cancel(self._alive)
        self._proven.stream.close()

    async def _send(self) -> None:
        with contextlib.suppress(OSError):
            while self._to_say:
                await self._proven.send(self._to_say[0])
                del self._to_say[0]

    async def _show_life(self) -> None:
        while True:
            await event_loop.pause(_ALIVE_SECONDS)
            self.say(alive=True)
