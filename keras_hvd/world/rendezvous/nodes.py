"""The `khvdrun`s of a job's hosts meet, and share out the ranks."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_hvd.exceptions import RendezvousError
from keras_hvd.world.rendezvous import address as addresses
from keras_hvd.world.rendezvous import gathering
from keras_hvd.world.rendezvous.connection import BeginTls, ProvenConnection
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.gathering import (
    Group,
    RendezvousClient,
    RendezvousServer,
)
from keras_hvd.world.rendezvous.messages import MessageError
from keras_hvd.world.rendezvous.proof import Purpose
from keras_hvd.world.rendezvous.secret import Secret

_MOST_RANKS = 2**31 - 1
_MOST_SAID_BYTES = 1 << 16

# The key of the message of a node whose ranks have met all others.
_MET = "met"


@dataclass(frozen=True)
class Node:
    """The `khvdrun` of one host, before it meets the others."""

    number: int
    count: int
    ranks: int  # on this host
    rendezvous: str  # HOST:PORT
    interfaces: tuple[str, ...] = ()


class NotMetError(RendezvousError):
    """The hosts have not met; another try may succeed."""


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of a job that one `khvdrun` starts."""

    first_rank: int
    size: int  # of the job
    job: str
    counts: tuple[int, ...] = ()  # of each node's ranks, if there are several


def meet(
    node: Node,
    secret: Secret,
    timeout: float,
    tls: BeginTls | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[NodeRanks, OtherNodes]:
    """Waits for the other nodes, and returns the ranks that this one starts.

    `say` shows the user what a node waits for. All nodes return, or all raise
    NotMetError with the reason.
    """
    group = Group(
        member="node",
        purpose=Purpose.NODES,
        number=node.number,
        count=node.count,
        addresses=[addresses.parse(node.rendezvous)],
        # The job has no name so far.
        key=secret.key(""),
        timeout=timeout,
        interfaces=node.interfaces,
        tls=tls,
        say=say,
    )
    loop = EventLoop()
    deadline = time.monotonic() + timeout
    # Another try does not change a malformed name.
    group.sources()
    try:
        if node.number != 0:
            return loop.run(_take_part(RendezvousClient(loop, group, deadline), node))
        server = RendezvousServer(
            loop, group, deadline, lambda _, told: _objection(told, node)
        )
        return loop.run(_serve(server, node))
    except RendezvousError as error:
        raise NotMetError(str(error)) from None


class OtherNodes:
    """The `khvdrun`s of the other hosts, until all ranks have met.

    Node 0 has a connection to each, and the others one to node 0, which passes on their
    messages. So if a rank fails before it comes, ranks of other hosts do not wait for
    it until the time-out.

    Only one process may use it, whichever processes have inherited its connections.

    Example:

    >>> others = OtherNodes([], failure="")
    >>> others.failure()
    ''
    """

    def __init__(self, connections: Sequence[ProvenConnection], failure: str):
        self._connections = connections
        self._failure = failure

    @functools.cached_property
    def _loop(self) -> EventLoop:
        loop = EventLoop()
        for each in self._connections:
            each.stream.deadline = math.inf
            loop.start(self._follow(each))
        return loop

    def fileno(self) -> int:
        """A descriptor that is readable when `failure` has something to do."""
        return self._loop.fileno()

    def failure(self) -> str:
        """Returns another node's reason why the ranks will not meet; "" if none."""
        self._loop.poll()
        return self._failure

    def fail(self, text: str) -> None:
        """Tells the other nodes why the ranks will not meet, unless they know."""
        if not self._failure:
            self._end(text)
            self._loop.poll()

    def leave(self) -> None:
        """Tells the other nodes that this node needs them no more."""
        self._tell({_MET: True})
        self._loop.poll()
        self._loop.close()
        for each in self._connections:
            each.stream.close()

    async def _follow(self, proven: ProvenConnection) -> None:
        name = f"the khvdrun of node {proven.peer} ({proven.host})"
        try:
            message = await proven.receive(_MOST_SAID_BYTES)
        except MessageError as error:
            self._end(f"a message of {name} is refused: {error}")
        except OSError:
            self._end(f"{name} ended before the ranks had met")
        else:
            if gathering.FAILED in message:
                self._end(str(message[gathering.FAILED]))

    def _end(self, text: str) -> None:
        self._failure = self._failure or text
        self._tell({gathering.FAILED: self._failure})

    def _tell(self, message: dict[str, Any]) -> None:
        for each in self._connections:
            self._loop.start(_send(each, message))


async def _send(proven: ProvenConnection, message: dict[str, Any]) -> None:
    # A node that is gone needs to know nothing.
    with contextlib.suppress(OSError):
        await proven.send(message)


async def _serve(server: RendezvousServer, node: Node) -> tuple[NodeRanks, OtherNodes]:
    with contextlib.closing(server):
        await server.open()
        told = await server.told()
        counts = [node.ranks, *(one["ranks"] for one in told)]
        if sum(counts) > _MOST_RANKS:
            await server.refuse(f"{sum(counts)} ranks are too many")
        job = f"khvdrun-{os.getpid()}-{uuid.uuid4().hex[:16]}"
        of_nodes = [
            NodeRanks(sum(counts[:number]), sum(counts), job, tuple(counts))
            for number in range(node.count)
        ]
        await server.answer(*map(vars, of_nodes[1:]))
        return of_nodes[0], OtherNodes(server.keep(), server.failure)


async def _take_part(
    client: RendezvousClient, node: Node
) -> tuple[NodeRanks, OtherNodes]:
    with contextlib.closing(client):
        await client.connect()
        answer = await client.tell(
            {"ranks": node.ranks, "nodes": node.count, **gathering.about_this_process()}
        )
        found = _node_ranks(answer, node)
        if found is None:
            raise RendezvousError(f"node 0 at {node.rendezvous} answers nonsense")
        return found, OtherNodes(client.keep(), client.failure)


def _node_ranks(answer: dict[str, Any], node: Node) -> NodeRanks | None:
    counts, job = answer.get("counts"), answer.get("job")
    if not isinstance(counts, list) or not isinstance(job, str):
        return None
    if len(counts) != node.count or not all(map(_is_count, counts)):
        return None
    first, size = sum(counts[: node.number]), sum(counts)
    told = {"first_rank": first, "size": size}
    is_alike = told.items() <= answer.items() and counts[node.number] == node.ranks
    if not is_alike or size > _MOST_RANKS:
        return None
    return NodeRanks(first, size, job, tuple(counts))


def _objection(told: dict[str, Any], node: Node) -> str:
    if not _is_count(told.get("ranks")):
        return "it does not say how many ranks it starts"
    if told.get("nodes") != node.count:
        return (
            f"it was started with --nnodes {told.get('nodes')}, and node 0 with "
            f"--nnodes {node.count}: give all the same"
        )
    return ""


def _is_count(value: Any) -> bool:
    # bool is a kind of int.
    return type(value) is int and 0 < value <= _MOST_RANKS
