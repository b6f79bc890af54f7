"""The other hosts of an elastic job, for the `khvdrun` that has the job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from keras_hvd.launch.talk import Talk
from keras_hvd.world.rendezvous.event_loop import EventLoop

LOST = 255 << 8
"""The wait status of ranks whose host is lost, as ssh tells of one."""


@dataclass(eq=False)
class Host:
    """Another host, as long as it is connected."""

    talk: Talk


_Host = TypeVar("_Host", bound=Host)


async def _heed_nothing(host: str, told: dict[str, Any]) -> None:
    pass


class OtherHosts(Generic[_Host]):
    """Hosts that start ranks of the job, by their names."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        """Hears the hosts, and sends what was said."""
        self._hosts: dict[str, _Host] = {}
        self.reached = 0
        """How many end by themselves when they have no rank, and are awaited."""
        self.on_told: Callable[[str, dict[str, Any]], Awaitable[None]] = _heed_nothing
        """Acts on a message of a host."""
        self.on_lost: Callable[[str, str, int], None] = lambda host, why, status: None
        """Called when a host is gone: says why, and the wait status of its ranks."""

    def start(self, host: str, number: int, stderr: int, /, **told: Any) -> None:
        """Starts a rank there. Raises OSError. `stderr` is where it will write."""
        self.ask(host, start=number, **told)

    def ask(self, host: str, /, **message: Any) -> None:
        """Sends a host a message, if it is still there."""
        if host in self._hosts:
            self._hosts[host].talk.say(**message)

    def ask_all(self, **message: Any) -> None:
        """Sends all hosts a message."""
        for each in self._hosts.values():
            each.talk.say(**message)
