"""The ranks of a job meet: they learn each other's places, and connect."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
from keras_hvd.world.rendezvous.gathering import Attendee, Convener, Group
from keras_hvd.world.rendezvous.links import Link, Links, WantedLinks
from keras_hvd.world.rendezvous.listener import listen_at_free_ports
from keras_hvd.world.rendezvous.proof import Purpose
from keras_hvd.world.rendezvous.rank_table import RankInfo, RankTable, TableError
from keras_hvd.world.rendezvous.secret import Secret

# The share of the timeout by which connecting ends sooner than waiting: a rank that
# cannot connect knows why.
_SOONER = 0.1


@dataclass(frozen=True)
class Arrangement:
    """The place where the ranks meet, and the secret that they prove there."""

    addresses: Sequence[Address]  # of rank 0, in the order to try
    secret: Secret
    # Rank 0's sockets, if it listens already.
    listening: Sequence[socket.socket] = ()
    # Tells the other ranks the arrangement, while rank 0 waits for them.
    telling: Callable[[EventLoop], Coroutine[Any, Any, None]] | None = None


@dataclass(frozen=True)
class Place:
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
    place: Place,
    arranged: Arrangement,
    wanted_links: WantedLinks,
    timeout: float,
    tls: BeginTls | None = None,
) -> Meeting:
    """Waits for the other ranks, and connects with those that `wanted_links` names.

    All ranks return, or all raise RendezvousError with the reason.
    """
    group = Group(
        member="rank",
        purpose=Purpose.RANKS,
        number=place.rank,
        count=place.size,
        addresses=arranged.addresses,
        key=arranged.secret.key(place.job),
        timeout=timeout,
        interfaces=place.interfaces,
        tls=tls,
        listening=arranged.listening,
    )
    open_files.allow(place.size)
    loop = EventLoop()
    if arranged.telling is not None:
        loop.start(arranged.telling(loop))
    return _Rank(loop, place, group, arranged.secret, wanted_links).meet()


@dataclass
class _Rank:
    """This process, while the ranks meet."""

    _loop: EventLoop
    _place: Place
    _group: Group
    _secret: Secret
    _wanted_links: WantedLinks

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self._group.timeout

    def meet(self) -> Meeting:
        return self._loop.run(
            self._convene() if self._place.rank == 0 else self._attend()
        )

    async def _convene(self) -> Meeting:
        """Rank 0's side."""
        convener = Convener(self._loop, self._group, self._deadline, self._objection)
        with contextlib.closing(convener):
            await convener.open()
            with self._open(convener.listening_at) as (listening, offered):
                told = await convener.told()
                try:
                    table = self._table(self._info(listening, offered), told)
                    await convener.answer(rank_table.encode(table))
                    shared = await convener.heard()
                    givers = [0, *(one.get("giver") for one in shared)]
                    table = table.divided(rank_table.decode_givers(givers, table))
                except TableError as error:
                    await convener.refuse(str(error))
                await convener.answer({"givers": givers})
                with self._links(table, listening) as links:
                    if not await self._are_made(links, lambda: bool(convener.failure)):
                        convener.fail(f"rank 0: {links.problem()}")
                    await convener.heard()
                    await convener.answer({})
                    reasons = [str(one["reason"]) for one in shared if "reason" in one]
                    return Meeting(table, links.take(), reasons)

    async def _attend(self) -> Meeting:
        """The side of the other ranks."""
        attendee = Attendee(self._loop, self._group, self._deadline)
        with contextlib.closing(attendee):
            own_host = await attendee.connect()
            with self._open([own_host]) as (listening, offered):
                own = self._info(listening, offered)
                answer = await attendee.tell(rank_table.encode_rank(own))
                try:
                    table = rank_table.decode(answer, self._place.size)
                    rank_table.check_carrier(table, own, self._place.mpi)
                    answer = await attendee.say(await self._giver(table))
                    givers = answer.get("givers")
                    table = table.divided(rank_table.decode_givers(givers, table))
                except TableError as error:
                    await attendee.give_up(f"the table of ranks is malformed: {error}")
                with self._links(table, listening) as links:
                    if not await self._are_made(links, lambda: bool(attendee.failure)):
                        await attendee.give_up(links.problem())
                    await attendee.say({})
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
        candidates = table.before_on_host(self._place.rank)
        giver, reason = await shared_memory.first_giver(candidates, self._deadline)
        own = table.ranks[self._place.rank]
        said: dict[str, Any] = {"giver": (giver or own).rank}
        return said | {"reason": f"{own} got no memory of {reason}"} if reason else said

    def _info(
        self, listening: Sequence[socket.socket], offered: shared_memory.Offer
    ) -> RankInfo:
        place = self._place
        ports = tuple(Address(*one.getsockname()[:2]) for one in listening)
        return RankInfo(
            rank=place.rank,
            size=place.size,
            local_rank=place.local_rank,
            local_size=place.local_size,
            addresses=ports,
            memory=offered.name,
            **rank_table.identity(place.host_key),
            **gathering.about_this_process(),
        )

    def _table(self, own: RankInfo, told: Sequence[dict[str, Any]]) -> RankTable:
        ranks = [own, *map(rank_table.decode_rank, told)]
        job = self._place.job or f"rendezvous-{uuid.uuid4().hex}"
        meeting = secrets.token_hex(16)
        table = RankTable(
            *(job, meeting, tuple(ranks)),
            *(self._place.data_connections, self._place.mpi, self._place.recorded),
        )
        rank_table.check(table)
        return table

    def _objection(self, number: int, told: dict[str, Any]) -> str:
        try:
            rank_table.check_rank(
                rank_table.decode_rank(told), number, self._place.size
            )
        except TableError as error:
            return str(error)
        return ""

    @contextlib.contextmanager
    def _links(
        self, table: RankTable, listening: Sequence[socket.socket]
    ) -> Iterator[Links]:
        place = self._place
        wanted = [
            connection
            for link in self._wanted_links(place.rank, table.hosts())
            for connection in _connections(link, table)
        ]
        open_files.allow(len(wanted))
        key = self._secret.key(f"{table.job}/{table.meeting}")
        links = Links(self._loop, place.rank, table, key, wanted, self._group.tls)
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
