"""Finds out which ranks share memory, because one can hand some to the other.

Equal names of machines prove nothing: a virtual machine's copy has the same ones, and a
container may keep its processes from those of another. So each rank offers a piece of
memory at an abstract unix socket, as the engine will. It then tries to get the others'
memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
from collections.abc import Iterator, Sequence

from keras_hvd.world.rendezvous import event_loop, unix_socket
from keras_hvd.world.rendezvous.event_loop import READ, EventLoop
from keras_hvd.world.rendezvous.rank_table import RankInfo


class Offer:
    """Memory that this rank hands to processes of its user, within a context.

    `loop` is running, and everything ends with it.

    Example:

    >>> async def share(offered):
    ...     info = RankInfo(0, 1, 0, 1, "a", "k", 0, "node0", 7, (), offered.name)
    ...     with offered.open(float("inf")):
    ...         return await first_giver([info], float("inf"))
    >>> loop = EventLoop()
    >>> giver, _ = loop.run(share(Offer(loop)))
    >>> giver.rank
    0
    """

    def __init__(self, loop: EventLoop):
        self.name = f"keras_hvd/memory/{secrets.token_hex(16)}"
        """The name that the others need, which is also the content of the memory."""
        self._loop = loop

    @contextlib.contextmanager
    def open(self, deadline: float) -> Iterator[None]:
        """Hands the memory over until the end of the context, or until the deadline."""
        with contextlib.ExitStack() as opened:
            memory = os.memfd_create("keras_hvd", os.MFD_CLOEXEC)
            opened.callback(os.close, memory)
            os.write(memory, self.name.encode())
            listening = opened.enter_context(unix_socket.listen(self.name))
            task = self._loop.start(_hand_over(listening, memory, deadline))
            opened.callback(self._loop.cancel, task)
            yield


async def _hand_over(listening: socket.socket, memory: int, deadline: float) -> None:
    while (accepted := await unix_socket.accept(listening, deadline)) is not None:
        # A process that asks may have gone.
        with accepted, contextlib.suppress(OSError):
            socket.send_fds(accepted, [b"!"], [memory])


async def first_giver(
    candidates: Sequence[RankInfo], deadline: float
) -> tuple[RankInfo | None, str]:
    """Returns the first of these ranks that hands over its memory, if there is one.

    Also returns why earlier ones do not; "" if there are none.

    Example:

    >>> info = RankInfo(0, 1, 0, 1, "a", "k", 0, "node0", 7, (), "nobody/offers/it")
    >>> EventLoop().run(first_giver([info], float("inf")))
    (None, 'rank 0 (process 7 on node0): Connection refused')
    """
    reasons = ""
    for one in candidates:
        try:
            await _receive(one.memory, deadline)
        except OSError as error:
            reasons = reasons or f"{one}: {error.strerror or error}"
        else:
            return one, reasons
    return None, reasons


async def _receive(name: str, deadline: float) -> None:
    """Gets the memory that is offered under `name`. Raises OSError."""
    with await unix_socket.connect(name, deadline) as connected:
        if not await event_loop.ready(connected, READ, deadline):
            raise TimeoutError("it does not answer")
        _, descriptors, _, _ = socket.recv_fds(connected, 1, 1)
    if not descriptors:
        raise ConnectionError("it hands nothing over")
    try:
        with mmap.mmap(descriptors[0], len(name), prot=mmap.PROT_READ) as memory:
            if memory[:] != name.encode():
                raise ConnectionError("it hands over other memory")
    except ValueError:
        raise ConnectionError("it hands over too little memory") from None
    finally:
        os.close(descriptors[0])
