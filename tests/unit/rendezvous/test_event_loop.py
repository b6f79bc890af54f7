"""Coroutines that wait for sockets, conditions and times."""

import math
import socket
import time

from keras_hvd.world.rendezvous.event_loop import READ, EventLoop, pause, ready, until


def run_beside(waiting: int, main):
    """Runs a coroutine while `waiting` others wait for a time that does not come."""
    loop = EventLoop()

    async def with_others():
        for _ in range(waiting):
            loop.start(pause(1000))
        await pause(0)
        return await main()

    return loop.run(with_others())


def seconds_of_wakes(waiting: int) -> float:
    """The CPU time of some wakes by a socket, while `waiting` others wait."""
    here, there = socket.socketpair()

    async def be_woken() -> float:
        before = time.process_time()
        for _ in range(500):
            there.send(b"!")
            await ready(here, READ, time.monotonic() + 1000)
            here.recv(1)
        return time.process_time() - before

    with here, there:
        return run_beside(waiting, be_woken)


def test_a_wake_takes_as_long_beside_thousands_of_waits():
    alone = min(seconds_of_wakes(0) for _ in range(3))
    assert min(seconds_of_wakes(4000) for _ in range(3)) < 5 * alone


def test_waits_end_in_the_order_of_their_times():
    ended = []
    loop = EventLoop()
    now = time.monotonic()

    async def end(name: str, seconds: float) -> None:
        await until(lambda: False, now + seconds)
        ended.append(name)

    async def main() -> None:
        for name, seconds in {"last": 0.03, "first": 0.01, "second": 0.02}.items():
            loop.start(end(name, seconds))
        await until(lambda: len(ended) == 3, math.inf)

    loop.run(main())
    assert ended == ["first", "second", "last"]


def test_the_time_of_an_ended_wait_ends_no_later_one():
    here, there = socket.socketpair()

    async def main() -> bool:
        soon = time.monotonic() + 0.01
        there.send(b"!")
        assert await ready(here, READ, soon)
        here.recv(1)
        return await until(lambda: time.monotonic() > soon + 0.02, soon + 1000)

    async def tick() -> None:
        while True:
            await pause(0.001)

    with here, there:
        loop = EventLoop()
        loop.start(tick())
        assert loop.run(main())
