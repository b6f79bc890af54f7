"""What a host that starts ranks, and who decides which, say to each other.

host:     hello     how many slots it has; and, to a service that was started again,
                    the last record, and how its ranks are
          leaves    its ranks are to leave at a commit
          meets     a rank joins the first job: rank 0's address, if it is that
          said      a word of a rank
          gone      a rank runs the function no more
          ended     a rank has ended, and how
other:    refused   why the host cannot join
          start     a rank, with its variables
          signal    one for a rank
          tell      a word for a rank
          at        where the ranks of the first job meet
          end       the job's exit code, and why

The `khvdrun` that has the job besides:

host:     output    what a rank writes; nothing more at its end
khvdrun:  close     nobody reads that any more

And a membership service:

service:  patience  how long a host waits for another service
          name      the host's
          record    what another service needs to go on from here
          fails     the ranks end if they do not do so by themselves
          stops     they end now
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

from keras_hvd.launch.pipes import Pipes
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
    """One end of such a connection. Both show that they are alive.

    Args:
        loop: is running.
        carrier: of the messages.
        patience: the seconds without a message after which the other end is gone.
        may_speak: whether it sends what it has to say; if not, once that is set.
    """

    def __init__(
        self,
        loop: EventLoop,
        carrier: ProvenConnection | Pipes,
        patience: float = PATIENCE_SECONDS,
        may_speak: bool = True,
    ):
        self._loop = loop
        self._carrier = carrier
        self.patience = patience
        self.may_speak = may_speak
        self._to_say: list[dict[str, Any]] = []
        self._alive = loop.start(self._show_life())

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
        self._carrier.stream.deadline = time.monotonic() + self.patience
        return await self._carrier.receive(_MOST_BYTES)

    def close(self) -> None:
        """Ends it."""
        self._loop.cancel(self._alive)
        self._carrier.stream.close()

    async def _send(self) -> None:
        await event_loop.until(lambda: self.may_speak, math.inf)
        with contextlib.suppress(OSError):
            while self._to_say:
                await self._carrier.send(self._to_say[0])
                del self._to_say[0]

    async def _show_life(self) -> None:
        while True:
            await event_loop.pause(_ALIVE_SECONDS)
            self.say(alive=True)
