"""The first host of an elastic job, as others come: right ones and wrong ones."""

import re
import socket
import time

import pytest

from keras_hvd.exceptions import RendezvousError
from keras_hvd.launch.joined_hosts import JoinedHosts
from keras_hvd.world.rendezvous import address, nodes
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.gathering import Group, RendezvousClient
from keras_hvd.world.rendezvous.messages import pack
from keras_hvd.world.rendezvous.nodes import Node
from keras_hvd.world.rendezvous.proof import Purpose
from keras_hvd.world.rendezvous.secret import Secret

SECRET = Secret(b"only these tests know")
LATEST = 20


def group_of(rendezvous, number, count=2, timeout=LATEST):
    place = address.parse(rendezvous)
    return Group(
        *("node", Purpose.HOSTS, number, count, [place], SECRET.key(""), timeout)
    )


def wait_for_two(rendezvous, timeout):
    """The hosts that the first one has met; it then knows them no more."""
    joined = JoinedHosts(group_of(rendezvous, 0, timeout=timeout), 1)
    named = joined.wait_for_all(1)
    joined.end(0)
    return named


def join(rendezvous, *packed):
    """What another host is told first that says this."""
    loop, group = EventLoop(), group_of(rendezvous, 1)

    async def run():
        client = RendezvousClient(loop, group, time.monotonic() + LATEST)
        await client.connect()
        (proven,) = client.keep()
        for each in packed:
            await proven.send_packed(each)
        try:
            return await proven.receive(1 << 16)
        except OSError as error:
            return type(error)
        finally:
            proven.stream.close()

    return loop.run(run())


RIGHT = pack({"slots": 3, "host_name": "b"})


@pytest.mark.parametrize(
    "words",
    [
        [pack({"slots": "many", "host_name": "b"})],
        [pack({"slots": True})],
        [pack({})],
        [b"no message"],
    ],
)
def test_a_host_that_says_nonsense_is_left_and_others_may_come(
    threads, rendezvous, words
):
    threads.start("first", wait_for_two, rendezvous, LATEST)
    assert join(rendezvous, *words) is ConnectionResetError
    assert join(rendezvous, RIGHT) == {"end": 0, "why": ""}
    assert [each.slots for each in threads.end()["first"]] == [1, 3]


def test_a_first_host_that_waits_for_no_other_listens_at_once(rendezvous):
    """Before it forks: each process would begin to listen, or complain at its end."""
    joined = JoinedHosts(group_of(rendezvous, 0, count=1), 1)
    joined.wait_for_all(1)
    place = address.parse(rendezvous)
    socket.create_connection(place).close()
    joined.end(0)


FIXED = re.compile(
    r"node 1 \(127.0.0.1\) was started without a range of --nnodes, as 2:4, or "
    "--min-np, and node 0 with: give all hosts the same options"
)


def test_a_host_of_a_job_with_fixed_hosts_learns_why_it_is_refused(threads, rendezvous):
    threads.start("first", wait_for_two, rendezvous, 2)
    threads.start("other", nodes.meet, Node(1, 2, 1, rendezvous), SECRET, LATEST)
    errors = threads.errors()
    assert FIXED.match(errors["other"])
    assert FIXED.search(errors["first"])


def test_a_host_that_may_come_and_go_is_refused_where_hosts_are_fixed(
    threads, rendezvous
):
    threads.start("first", nodes.meet, Node(0, 2, 1, rendezvous), SECRET, LATEST)
    told = join(rendezvous, RIGHT)
    why = (
        "was started with a range of --nnodes, as 2:4, or --min-np, and node 0 without"
    )
    assert why in told["refused"]
    assert why in threads.errors()["first"]


def test_a_name_that_means_loopback_here_is_explained(rendezvous, monkeypatch):
    monkeypatch.setattr(
        address, "resolve", lambda name: [address.Address("127.0.0.1", name.port)]
    )
    named = f"node0:{rendezvous.rpartition(':')[2]}"
    with pytest.raises(RendezvousError, match="Here node0 means 127.0.0.1, which oth"):
        wait_for_two(named, 0.2)
