"""Makes the connections that a rank's engine needs, all at once.

Of two ranks, the higher one connects to the lower one, which listens. Both prove the
secret for exactly these two ranks and this purpose.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_hvd.world.rendezvous import connection
from keras_hvd.world.rendezvous.connection import (
    BeginTls,
    Call,
    ProvenConnection,
    Stream,
)
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.listener import Listener
from keras_hvd.world.rendezvous.proof import Hello, Purpose
from keras_hvd.world.rendezvous.rank_table import RankTable

_MOST_NAMED = 8


@dataclass(frozen=True)
class Link:
    """A connection that a rank needs: peer, purpose, and number among several."""

    peer: int
    purpose: Purpose
    number: int = 0


WantedLinks = Callable[[int, Sequence[int]], Sequence[Link]]
"""The links that a rank needs, from its number and the host of each rank."""


class Links:
    """The links of one rank, while they are made."""

    def __init__(
        self,
        loop: EventLoop,
        rank: int,
        table: RankTable,
        key: bytes,
        wanted: Sequence[Link],
        tls: BeginTls | None = None,
    ):
        self.failure = ""
        self._loop = loop
        self._rank = rank
        self._table = table
        self._key = key
        self._tls = tls
        self._wanted = frozenset(wanted)
        self._made: dict[Link, Stream] = {}
        self._listener = Listener(
            loop, connection.proving(key, tls, self._is_expected), self._welcome
        )

    def start(
        self,
        listening: Sequence[socket.socket],
        sources: Sequence[str],
        deadline: float,
    ) -> None:
        """Listens at some sockets, which then belong to this object, and connects."""
        for each in listening:
            self._listener.start(each)
        for link in self._wanted:
            if link.peer < self._rank:
                self._loop.start(self._connect(link, sources, deadline))

    @property
    def are_made(self) -> bool:
        """Whether all links are there."""
        return len(self._made) == len(self._wanted)

    def problem(self) -> str:
        """Explains why links are missing."""
        if self.failure:
            return self.failure
        missing = {link.peer for link in self._wanted if link not in self._made}
        names = [str(self._table.ranks[peer]) for peer in sorted(missing)]
        return f"no connection with {', '.join(names[:_MOST_NAMED])} in time. {_ADVICE}"

    def take(self) -> dict[Link, Stream]:
        """The links, which then belong to the caller."""
        made, self._made = self._made, {}
        return made

    def close(self) -> None:
        """Ends listening, and closes the links that were not taken."""
        self._listener.close()
        for each in self.take().values():
            each.close()

    async def _connect(
        self, link: Link, sources: Sequence[str], deadline: float
    ) -> None:
        peer = self._table.ranks[link.peer]
        call = Call(
            *(self._key, link.purpose, self._rank, link.peer, sources),
            *(self._tls, link.number),
        )
        try:
            proven = await connection.connect(call, lambda: peer.addresses, deadline)
        except OSError as error:
            places = " or ".join(map(str, peer.addresses))
            self.failure = self.failure or (
                f"no connection to {peer} at {places}: {error.strerror or error}. "
                f"{_ADVICE}"
            )
        else:
            self._keep(link, proven)

    def _is_expected(self, theirs: Hello) -> bool:
        link = Link(theirs.sender, theirs.purpose, theirs.number)
        is_here = theirs.receiver == self._rank and theirs.sender > self._rank
        is_alike = theirs.tls == (self._tls is not None)
        return is_here and is_alike and link in self._wanted

    async def _welcome(self, proven: ProvenConnection) -> None:
        self._keep(Link(proven.peer, proven.purpose, proven.number), proven)

    def _keep(self, link: Link, proven: ProvenConnection) -> None:
        # A client that gave up just before the server's proof has come again.
        earlier = self._made.pop(link, None)
        if earlier is not None:
            earlier.close()
        self._made[link] = proven.stream


_ADVICE = (
    "The hosts' firewalls must let these ranks connect, at any port; "
    "KERAS_HVD_NETWORK_INTERFACES names the network to use"
)
