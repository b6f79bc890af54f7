"""The `khvdrun`s of a job's hosts meet, and share out the ranks."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_hvd.exceptions import RendezvousError
from keras_hvd.rendezvous import address as addresses
from keras_hvd.rendezvous import gathering
from keras_hvd.rendezvous.connection import BeginTls
from keras_hvd.rendezvous.event_loop import EventLoop
from keras_hvd.rendezvous.gathering import Attendee, Convener, Group
from keras_hvd.rendezvous.proof import Purpose
from keras_hvd.rendezvous.secret import Secret

_MOST_RANKS = 2**31 - 1


@dataclass(frozen=True)
class Node:
    """What the `khvdrun` of one host knows before it meets the others."""

    number: int
    count: int
    ranks: int  # that it starts
    rendezvous: str  # HOST:PORT
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class Share:
    """The ranks of a job that one `khvdrun` starts."""

    first_rank: int
    size: int  # of the job
    job: str


def meet(
    node: Node,
    secret: Secret,
    timeout: float,
    tls: BeginTls | None = None,
    say: Callable[[str], None] | None = None,
) -> Share:
    """Waits for the other nodes, and returns which ranks this one starts.

    `say` tells the user what node 0 waits for, besides the others. All nodes return, or
    all raise RendezvousError with the reason.
    """
    group = Group(
        member="node",
        purpose=Purpose.NODES,
        number=node.number,
        count=node.count,
        addresses=[addresses.parse(node.rendezvous)],
        # It has no name so far.
        key=secret.key(""),
        timeout=timeout,
        interfaces=node.interfaces,
        tls=tls,
        say=say,
    )
    loop = EventLoop()
    deadline = time.monotonic() + timeout
    if node.number == 0:
        convener = Convener(
            loop, group, deadline, lambda _, told: _objection(told, node)
        )
        return loop.run(_convene(convener, node))
    return loop.run(_attend(Attendee(loop, group, deadline), node))


async def _convene(convener: Convener, node: Node) -> Share:
    with contextlib.closing(convener):
        await convener.open()
        told = await convener.told()
        counts = [node.ranks, *(one["ranks"] for one in told)]
        if sum(counts) > _MOST_RANKS:
            await convener.refuse(f"{sum(counts)} ranks are too many")
        job = f"khvdrun-{os.getpid()}-{uuid.uuid4().hex[:16]}"
        shares = [
            Share(sum(counts[:number]), sum(counts), job)
            for number in range(node.count)
        ]
        await convener.answer(*map(vars, shares[1:]))
        return shares[0]


async def _attend(attendee: Attendee, node: Node) -> Share:
    with contextlib.closing(attendee):
        await attendee.connect()
        answer = await attendee.tell(
            {
                "ranks": node.ranks,
                "nodes": node.count,
                **gathering.about_this_process(),
            }
        )
        share = _share(answer, node)
        if share is None:
            raise RendezvousError(f"node 0 at {node.rendezvous} answers nonsense")
        return share


def _share(answer: dict[str, Any], node: Node) -> Share | None:
    first, size, job = (answer.get(name) for name in ("first_rank", "size", "job"))
    if type(first) is not int or type(size) is not int or not isinstance(job, str):
        return None
    is_inside = 0 <= first <= size - node.ranks and size <= _MOST_RANKS
    return Share(first, size, job) if is_inside else None


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
