"""The connections that a rank takes for a link: they have proven exactly that."""

import math
import time

import pytest

from keras_hvd.world.rendezvous import connection, event_loop
from keras_hvd.world.rendezvous.address import Address
from keras_hvd.world.rendezvous.connection import BeginTls, Call, Stream
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.links import Link, Links
from keras_hvd.world.rendezvous.listener import listen
from keras_hvd.world.rendezvous.proof import Purpose
from keras_hvd.world.rendezvous.rank_table import RankTable

KEY = b"of this start of the job"


def try_to_link(*calls: Call, tls: BeginTls | None = None) -> dict[Link, Stream]:
    """The links of rank 1, which waits for one of rank 2 for control, after calls."""

    async def call_all():
        (listening,) = listen([Address("127.0.0.1", 0)])
        place = Address(*listening.getsockname())
        links.start([listening], [], math.inf)
        for call in calls:
            try:
                deadline = time.monotonic() + 0.5
                await connection.connect(call, lambda: [place], deadline)
            except OSError:
                continue
            await event_loop.until(lambda: links.are_made, math.inf)
        made = links.take()
        links.close()
        return made

    loop = EventLoop()
    table = RankTable("job", "", ())
    links = Links(loop, 1, table, KEY, [Link(2, Purpose.CONTROL)], tls)
    return loop.run(call_all())


def test_takes_who_has_proven_the_pair_and_the_purpose():
    made = try_to_link(Call(KEY, Purpose.CONTROL, sender=2, receiver=1))
    assert [*made] == [Link(2, Purpose.CONTROL)]
    made.popitem()[1].close()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(Call(KEY, Purpose.DATA, 2, 1), id="purpose"),
        pytest.param(Call(KEY, Purpose.RANKS, 2, 1), id="no-link"),
        pytest.param(Call(KEY, Purpose.CONTROL, 3, 1), id="sender"),
        pytest.param(Call(KEY, Purpose.CONTROL, 0, 1), id="lower-sender"),
        pytest.param(Call(KEY, Purpose.CONTROL, 2, 0), id="receiver"),
        pytest.param(Call(KEY, Purpose.CONTROL, 2, 1, number=1), id="number"),
        pytest.param(Call(b"of another", Purpose.CONTROL, 2, 1), id="another-start"),
    ],
)
def test_takes_nobody_else(call):
    assert try_to_link(call) == {}


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("comes", [False, True])
def test_takes_who_speaks_in_the_same_way(begin_tls, wants, comes):
    call = Call(KEY, Purpose.CONTROL, 2, 1, tls=begin_tls if comes else None)
    made = try_to_link(call, tls=begin_tls if wants else None)
    assert [*made] == ([Link(2, Purpose.CONTROL)] if wants == comes else [])
    for stream in made.values():
        assert (stream.tls is not None) == wants
        stream.close()


def test_a_rank_that_comes_again_has_given_up_its_first_connection():
    call = Call(KEY, Purpose.CONTROL, sender=2, receiver=1)
    made = try_to_link(call, call)
    assert [*made] == [Link(2, Purpose.CONTROL)]
    made.popitem()[1].close()
