"""Ranks of one host that make a job of a part of all ranks agree on that part.

Each asks all others of its list for their lists, and tells whether all have given the
same. So ranks whose lists overlap or differ learn of it, all with the same text.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from keras_hvd.exceptions import RendezvousError
from keras_hvd.world.rendezvous import event_loop, unix_socket
from keras_hvd.world.rendezvous.connection import Stream
from keras_hvd.world.rendezvous.event_loop import EventLoop

_PAUSE_SECONDS = 0.02
# How long a rank that knows of a mismatch waits for others, to tell them.
_VERDICT_SECONDS = 5.0
_LENGTH_BYTES = 4
_MOST_BYTES = 1 << 20


def agree(
    job: str, rank: int, ranks: Sequence[int], number: int, timeout: float
) -> None:
    """Waits until all of these ranks have given the same list.

    Args:
        job: the name of the job of all ranks, which are on this host.
        rank: this rank, which is in the list.
        ranks: the list that this rank has been given.
        number: how many times this process has done so before. A process with a lower
            number may still be about to give another list.
        timeout: seconds.

    Raises:
        RendezvousError: the lists differ, or a rank does not come in time.

    Example:

    >>> agree("job", rank=2, ranks=[2], number=0, timeout=1)
    """
    loop = EventLoop()
    loop.run(_Agreement(loop, job, rank, ranks, number, timeout).reach())


def mismatch(rank: int, ranks: Sequence[int], other: int, others: Sequence[int]) -> str:
    """Describes the conflict between the lists of two ranks; "" if there is none.

    Example:

    >>> mismatch(0, [0, 1], 1, [0, 1]), mismatch(0, [0, 1], 2, [2, 3])
    ('', '')
    >>> print(mismatch(1, [1, 2], 0, [0, 1]))
    rank 0 gave comm=[0, 1], and rank 1 gave comm=[1, 2]: a rank is in one part, ...
    """
    if [*ranks] == [*others] or not {*ranks} & {*others}:
        return ""
    (first, its), (second, that) = sorted([(rank, [*ranks]), (other, [*others])])
    return (
        f"rank {first} gave comm={its}, and rank {second} gave comm={that}: a rank is "
        "in one part, whose ranks all give the same list"
    )


class _Agreement:
    def __init__(
        self,
        loop: EventLoop,
        job: str,
        rank: int,
        ranks: Sequence[int],
        number: int,
        timeout: float,
    ):
        self._loop = loop
        self._job = job
        self._rank = rank
        self._ranks = [*ranks]
        self._own = {"rank": rank, "ranks": [*ranks], "number": number}
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._missing = {*ranks} - {rank}  # have not told their lists
        self._undecided = {*self._missing}  # have not told their verdicts
        self._unserved = {*self._missing}  # have not heard this rank's verdict
        self._failure = ""
        self._difference = ""  # to one that may be about to give another list

    async def reach(self) -> None:
        with self._listening() as listening:
            self._loop.start(self._serve(listening))
            for other in [*self._missing]:
                self._loop.start(self._ask(other))
            await event_loop.until(
                lambda: bool(self._failure) or not self._undecided | self._unserved,
                self._deadline,
            )
            if not self._failure and self._undecided | self._unserved:
                self._fail(self._late())
            if self._failure:
                await event_loop.until(
                    lambda: not self._unserved, time.monotonic() + _VERDICT_SECONDS
                )
                raise RendezvousError(f"init: {self._failure}")

    def _listening(self) -> socket.socket:
        try:
            return unix_socket.listen(self._name(self._rank))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise RendezvousError(
                f"init: two processes of this job are rank {self._rank}, or two of its "
                "threads call init: give each process a rank of its own"
            ) from None

    def _name(self, rank: int) -> str:
        return f"keras_hvd/{os.geteuid()}/{self._job}/part of {rank}"

    def _fail(self, text: str) -> None:
        self._failure = self._failure or text

    def _late(self) -> str:
        if self._difference:
            return self._difference
        late = sorted(self._missing or self._undecided | self._unserved)
        names = ", ".join(map(str, late))
        return (
            f"rank {self._rank} waited {self._timeout:g} s, and of the ranks "
            f"{self._ranks} of its comm {names} did not come to init: have all of them "
            "call it with the same list, and look at their own errors"
        )

    async def _serve(self, listening: socket.socket) -> None:
        while True:
            accepted = await unix_socket.accept(
                listening, self._deadline + 2 * _VERDICT_SECONDS
            )
            if accepted is None:
                return
            self._loop.start(self._answer(accepted))

    async def _answer(self, accepted: socket.socket) -> None:
        stream = Stream(accepted, self._deadline + 2 * _VERDICT_SECONDS)
        with contextlib.closing(stream), contextlib.suppress(OSError, ValueError):
            said = await _receive(stream)
            await _send(stream, self._own)
            other = self._compare(said)
            await self._exchange_verdicts(stream)
            self._unserved.discard(other)

    async def _ask(self, other: int) -> None:
        while not self._failure:
            try:
                connected = await unix_socket.connect(self._name(other), self._deadline)
            except ConnectionRefusedError:
                await event_loop.pause(_PAUSE_SECONDS)
                continue
            stream = Stream(connected, self._deadline + 2 * _VERDICT_SECONDS)
            with contextlib.closing(stream), contextlib.suppress(OSError, ValueError):
                await _send(stream, self._own)
                self._compare(await _receive(stream))
                await self._exchange_verdicts(stream)
                self._undecided.discard(other)
                return
            # The other rank has ended, or begins again.
            await event_loop.pause(_PAUSE_SECONDS)

    def _compare(self, said: dict[str, Any]) -> int:
        """Notes another rank's list; returns that rank.

        Raises ValueError if that rank must be asked again.
        """
        other = int(said["rank"])
        difference = mismatch(self._rank, self._ranks, other, said["ranks"])
        if said["number"] != self._own["number"] and difference:
            self._difference = difference
            raise ValueError("one of them is late")
        self._fail(difference)
        if not self._failure:
            self._missing.discard(other)
        return other

    async def _exchange_verdicts(self, stream: Stream) -> None:
        """Tells another rank whether all agree, once known, and hears its verdict."""
        await event_loop.until(
            lambda: bool(self._failure) or not self._missing, self._deadline
        )
        await _send(stream, {"failed": self._failure})
        self._fail(str((await _receive(stream))["failed"]))


async def _send(stream: Stream, message: dict[str, Any]) -> None:
    content = json.dumps(message).encode()
    await stream.send(len(content).to_bytes(_LENGTH_BYTES, "big") + content)


async def _receive(stream: Stream) -> dict[str, Any]:
    length = int.from_bytes(await stream.receive(_LENGTH_BYTES), "big")
    if length > _MOST_BYTES:
        raise ValueError("too long")
    return json.loads(await stream.receive(length))
