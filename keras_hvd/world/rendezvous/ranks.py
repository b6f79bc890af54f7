"""The ranks of a job meet: they learn each other's places, and connect."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keras_hvd.exceptions import RendezvousError
from keras_hvd.world.rendezvous import (
    event_loop,
    gathering,
    open_files,
    rank_table,
    shared_memory,
)
from keras_hvd.world.rendezvous.address import Address
from keras_hvd.world.rendezvous.connection import BeginTls, Stream
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.gathering import (
    Group,
    RendezvousClient,
    RendezvousServer,
)
from keras_hvd.world.rendezvous.links import Link, Links, WantedLinks
from keras_hvd.world.rendezvous.listener import listen_at_free_ports
from keras_hvd.world.rendezvous.proof import Purpose
from keras_hvd.world.rendezvous.rank_table import RankInfo, RankTable, TableError
from keras_hvd.world.rendezvous.secret import Secret

# The share of the timeout by which connecting ends sooner than waiting: a rank that
# cannot connect knows why.
_SOONER = 0.1


@dataclass(frozen=True)
class MeetingPoint:
    """The place where the ranks meet, and the secret that they prove there."""

    addresses: Sequence[Address]  # of rank 0, in the order to try
    secret: Secret
    # Rank 0's sockets, if it listens already.
    listening: Sequence[socket.socket] = ()
    # Tells the other ranks the arrangement, while rank 0 waits for them.
    telling: Callable[[EventLoop], Coroutine[Any, Any, None]] | None = None


@dataclass(frozen=True)
class RankIdentity:
    """A rank's own facts, before it meets the others.

    `job` may be empty: rank 0 then makes up a name.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str = ""
    host_key: str | None = None
    interfaces: tuple[str, ...] = ()
    data_connections: int = 1  # rank 0's counts
    mpi: bool = False  # whether MPI is to carry tensors; the same on all ranks
    recorded: bool = False  # whether there is a recording of the job; rank 0's counts


@dataclass(frozen=True)
class Meeting:
    """The result of the ranks' meeting, on one of them.

    The links' sockets are not blocking, and belong to the caller.
    """

    table: RankTable
    links: dict[Link, Stream]
    # The reasons why ranks of one machine share no memory, as known to rank 0.
    without_memory: Sequence[str] = ()


def meet(
    identity: RankIdentity,
    point: MeetingPoint,
    wanted_links: WantedLinks,
    timeout: float,
    tls: BeginTls | None = None,
    cancel: int | None = None,
) -> Meeting:
    """Waits for the other ranks, and connects with those that `wanted_links` names.

    All ranks return, or all raise RendezvousError with the reason. So does a rank that
    has something to read at the descriptor `cancel`.
    """
    group = Group(
        member="rank",
        purpose=Purpose.RANKS,
        number=identity.rank,
        count=identity.size,
        addresses=point.addresses,
        key=point.secret.key(identity.job),
        timeout=timeout,
        interfaces=identity.interfaces,
        tls=tls,
        listening=point.listening,
    )
    open_files.allow(identity.size)
    loop = EventLoop()
    if point.telling is not None:
        loop.start(point.telling(loop))
    if cancel is not None:
        loop.start(_end_once_readable(cancel))
    return _Rank(loop, identity, group, point.secret, wanted_links).meet()


async def _end_once_readable(cancel: int) -> None:
    await event_loop.ready(cancel, event_loop.READ, math.inf)
    raise RendezvousError("the start was cancelled before all ranks had met")


@dataclass
class _Rank:
    """This process, while the ranks meet."""

    _loop: EventLoop
    _identity: RankIdentity
    _group: Group
    _secret: Secret
    _wanted_links: WantedLinks

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self._group.timeout

    def meet(self) -> Meeting:
        return self._loop.run(
            self._serve() if self._identity.rank == 0 else self._take_part()
        )

    async def _serve(self) -> Meeting:
        """Rank 0's side."""
        server = RendezvousServer(
            self._loop, self._group, self._deadline, self._objection
        )
        with contextlib.closing(server):
            await server.open()
            with self._open(server.listening_at) as (listening, offered):
                told = await server.told()
                try:
                    table = self._table(self._info(listening, offered), told)
                    await server.answer(rank_table.encode(table))
                    shared = await server.heard()
                    givers = [0, *(one.get("giver") for one in shared)]
                    table = table.divided(rank_table.decode_givers(givers, table))
                except TableError as error:
                    await server.refuse(str(error))
                await server.answer({"givers": givers})
                with self._links(table, listening) as links:
                    if not await self._are_made(links, lambda: bool(server.failure)):
                        server.fail(f"rank 0: {links.problem()}")
                    await server.heard()
                    await server.answer({})
                    reasons = [str(one["reason"]) for one in shared if "reason" in one]
                    return Meeting(table, links.take(), reasons)

    async def _take_part(self) -> Meeting:
        """The side of the other ranks."""
        client = RendezvousClient(self._loop, self._group, self._deadline)
        with contextlib.closing(client):
            own_host = await client.connect()
            with self._open([own_host]) as (listening, offered):
                own = self._info(listening, offered)
                answer = await client.tell(rank_table.encode_rank(own))
                try:
                    table = rank_table.decode(answer, self._identity.size)
                    rank_table.check_carrier(table, own, self._identity.mpi)
                    answer = await client.say(await self._giver(table))
                    givers = answer.get("givers")
                    table = table.divided(rank_table.decode_givers(givers, table))
                except TableError as error:
                    await client.give_up(f"the table of ranks is malformed: {error}")
                with self._links(table, listening) as links:
                    if not await self._are_made(links, lambda: bool(client.failure)):
                        await client.give_up(links.problem())
                    await client.say({})
                    return Meeting(table, links.take())

    @contextlib.contextmanager
    def _open(
        self, hosts: Sequence[str]
    ) -> Iterator[tuple[list[socket.socket], shared_memory.Offer]]:
        """Sockets at free ports of these IP addresses, and memory for local ranks."""
        offered = shared_memory.Offer(self._loop)
        with contextlib.ExitStack() as opened:
            listening = listen_at_free_ports(hosts)
            for each in listening:
                opened.enter_context(each)
            opened.enter_context(offered.open(self._deadline))
            yield listening, offered

    async def _giver(self, table: RankTable) -> dict[str, Any]:
        """Names the rank that hands this one memory: itself, if no earlier one does."""
        candidates = table.before_on_host(self._identity.rank)
        giver, reason = await shared_memory.first_giver(candidates, self._deadline)
        own = table.ranks[self._identity.rank]
        said: dict[str, Any] = {"giver": (giver or own).rank}
        return said | {"reason": f"{own} got no memory of {reason}"} if reason else said

    def _info(
        self, listening: Sequence[socket.socket], offered: shared_memory.Offer
    ) -> RankInfo:
        identity = self._identity
        ports = tuple(Address(*one.getsockname()[:2]) for one in listening)
        return RankInfo(
            rank=identity.rank,
            size=identity.size,
            local_rank=identity.local_rank,
            local_size=identity.local_size,
            addresses=ports,
            memory=offered.name,
            **rank_table.identity(identity.host_key),
            **gathering.about_this_process(),
        )

    def _table(self, own: RankInfo, told: Sequence[dict[str, Any]]) -> RankTable:
        ranks = [own, *map(rank_table.decode_rank, told)]
        job = self._identity.job or f"rendezvous-{uuid.uuid4().hex}"
        meeting = secrets.token_hex(16)
        table = RankTable(
            *(job, meeting, tuple(ranks)),
            *(
                self._identity.data_connections,
                self._identity.mpi,
                self._identity.recorded,
            ),
        )
        rank_table.check(table)
        return table

    def _objection(self, number: int, told: dict[str, Any]) -> str:
        try:
            rank_table.check_rank(
                rank_table.decode_rank(told), number, self._identity.size
            )
        except TableError as error:
            return str(error)
        return ""

    @contextlib.contextmanager
    def _links(
        self, table: RankTable, listening: Sequence[socket.socket]
    ) -> Iterator[Links]:
        identity = self._identity
        wanted = [
            connection
            for link in self._wanted_links(identity.rank, table.hosts())
            for connection in _connections(link, table)
        ]
        open_files.allow(len(wanted))
        key = self._secret.key(f"{table.job}/{table.meeting}")
        links = Links(self._loop, identity.rank, table, key, wanted, self._group.tls)
        with contextlib.closing(links):
            connecting_ends = self._deadline - _SOONER * self._group.timeout
            links.start(listening, self._group.sources(), connecting_ends)
            yield links

    async def _are_made(self, links: Links, has_failed: Callable[[], bool]) -> bool:
        """Waits for the links; True also if the job has failed elsewhere."""
        await event_loop.until(
            lambda: links.are_made or bool(links.failure) or has_failed(),
            self._deadline,
        )
        return links.are_made or has_failed()


def _connections(link: Link, table: RankTable) -> Iterator[Link]:
    is_for_tensors = link.purpose == Purpose.DATA
    if is_for_tensors and table.mpi:
        return
    count = table.data_connections if is_for_tensors else 1
    yield from (dataclasses.replace(link, number=number) for number in range(count))
