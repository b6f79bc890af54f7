"""Events leave enough of a job, and a seed tells all of them."""

import random
import re

import pytest

from keras_hvd.elastic.events import KINDS, Hosts, Membership, choose


@pytest.fixture
def hosts(tmp_path):
    (tmp_path / "hosts").write_text("node0:1\nnode1:2\nnode2:1\n")
    return Hosts(tmp_path / "hosts")


@pytest.mark.parametrize("kind", KINDS)
def test_enough_ranks_are_left(hosts, kind):
    chance = random.Random(0)
    for members in range(1, 6):
        for least in range(1, members + 1):
            job = Membership(members)
            event = choose(chance, [kind], job, least, range(members + 1), hosts)
            if event is None:
                continue
            left = job.members - {*event.killed}
            assert len(left) >= least
            assert event.stopped is None or event.stopped in left
            if event.host:
                hosts.toggle(event.host)
                assert hosts.slots >= least


def test_a_seed_tells_all():
    one, other = (random.Random(7) for _ in range(2))
    for _ in range(50):
        events = [
            choose(each, [*KINDS], Membership(4), 2, [4]) for each in (one, other)
        ]
        assert events[0] == events[1]


def test_all_kinds_happen(hosts):
    hosts.toggle("node0:1")
    chance = random.Random(0)
    events = [
        choose(chance, [*KINDS], Membership(4), 2, range(5), hosts) for _ in range(200)
    ]
    assert {event.kind for event in events} == {*KINDS}
    assert {event.killed for event in events if event.kind == "new"} == {(4,)}


def test_a_new_rank_is_not_killed_again_before_it_has_joined():
    job = Membership(2)
    job.hit.add(2)
    job.hear("khvdrun: rank 2 (on node1) was killed by signal 9 before it had joined")
    assert choose(random.Random(0), ["new"], job, 1, range(3)) is None
    job.hear("khvdrun: the job goes on with 3: those that were started as 0, 1, 2")
    job.hear("khvdrun: rank 2 (on node1) was killed by signal 9; 2 ranks are left")
    assert choose(random.Random(0), ["new"], job, 1, range(3)) is not None


def test_what_nobody_has_killed_is_a_surprise():
    job = Membership(3)
    job.hear("[1] khvdrun: rank 2 is what the script talks of\n")
    job.hear("khvdrun: rank 1 (process 7) ended with exit code 1; 2 ranks are left\n")
    (surprise,) = job.surprises
    assert re.search("rank 1 .* exit code 1", surprise)


def test_hosts_leave_one_by_one_and_all_return(hosts, tmp_path):
    assert hosts.may_leave(least=3) == ["node0:1", "node2:1"]
    hosts.toggle("node1:2")
    assert (hosts.ranks_away, hosts.away) == ({1, 2}, ["node1:2"])
    assert hosts.may_leave(least=2) == []
    hosts.restore()
    assert (tmp_path / "hosts").read_text() == "node0:1\nnode1:2\nnode2:1\n"
