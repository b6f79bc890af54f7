"""Ranks that meet: the connections that they get, and the errors that they raise."""

import contextlib
import os
import pathlib
import re
import resource
import socket
import subprocess
import sys
import time

import pytest

from keras_hvd.version import __version__
from keras_hvd.world.rendezvous import address, gathering, rank_table, ranks
from keras_hvd.world.rendezvous.connection import Stream
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.links import Link
from keras_hvd.world.rendezvous.proof import Purpose

ROOT = pathlib.Path(__file__).resolve().parents[3]


def send(stream: Stream, content: bytes) -> None:
    stream.deadline = time.monotonic() + 5
    EventLoop().run(stream.send(content))


def receive(stream: Stream) -> bytes:
    """The next byte."""
    stream.deadline = time.monotonic() + 5
    return EventLoop().run(stream.receive(1))


def exchange_names(meetings) -> dict[tuple[int, int, Purpose], str]:
    """The bytes at each end of each link, when all send their rank and purpose."""
    for rank, meeting in enumerate(meetings):
        for link, stream in meeting.links.items():
            send(stream, f"{rank} to {link.peer}: {link.purpose.name};".encode())
    found = {}
    for rank, meeting in enumerate(meetings):
        for link, stream in meeting.links.items():
            text = b""
            while not text.endswith(b";"):
                text += receive(stream)
            found[rank, link.peer, link.purpose] = text.decode().rstrip(";")
    for meeting in meetings:
        for stream in meeting.links.values():
            stream.close()
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize(
    ("keys", "hosts"),
    [
        pytest.param("ab", [0, 1], id="two"),
        pytest.param("aabb", [0, 0, 1, 1], id="even"),
        pytest.param("abbbc", [0, 1, 1, 1, 2], id="uneven"),
        pytest.param("bacab", [0, 1, 2, 1, 0], id="any-order"),
    ],
)
@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "tls"])
def test_links_connect_the_ranks_that_they_say(
    new_job, begin_tls, host, keys, hosts, encrypted
):
    job = new_job(len(keys), host, tls=begin_tls if encrypted else None)
    for rank, key in reversed([*enumerate(keys)]):
        job.start(rank, key)
    meetings = job.end()
    assert all(meeting.table.hosts() == hosts for meeting in meetings)
    streams = [each for meeting in meetings for each in meeting.links.values()]
    assert all((each.tls is not None) == encrypted for each in streams)
    assert exchange_names(meetings) == {
        (rank, peer, purpose): f"{peer} to {rank}: {purpose.name}"
        for rank, host in enumerate(hosts)
        for peer, other in enumerate(hosts)
        for purpose in (Purpose.CONTROL, Purpose.DATA)
        if host != other
    }


def test_all_know_where_all_are(new_job):
    job = new_job(3)
    for rank, key in enumerate("aab"):
        job.start(rank, key, local_rank=[0, 1, 0][rank], local_size=[2, 2, 1][rank])
    meetings = job.end()
    (table,) = {meeting.table for meeting in meetings}
    assert [one.rank for one in table.ranks] == [0, 1, 2]
    assert {one.pid for one in table.ranks} == {os.getpid()}
    assert {one.host_name for one in table.ranks} == {socket.gethostname()}
    assert [table.cross(rank) for rank in range(3)] == [(0, 2), (0, 1), (1, 2)]
    assert table.job.startswith("rendezvous-")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_that_is_called_off_ends(new_job, rank):
    """Although the other rank never comes."""
    cancel, calls_off = os.pipe()
    job = new_job(2)
    job.start(rank, cancel=cancel)
    os.write(calls_off, b"!")
    assert "the start was cancelled" in job.errors()[rank]
    os.close(calls_off)
    os.close(cancel)


def test_the_table_is_written_once_for_all(new_job, monkeypatch):
    written = []
    pack = gathering.pack
    monkeypatch.setattr(gathering, "pack", lambda m: written.append(m) or pack(m))
    job = new_job(5)
    for rank in range(5):
        job.start(rank, "one host")
    job.end()
    assert [len(each["ranks"]) for each in written if "ranks" in each] == [5]


def test_a_small_limit_of_open_files_is_raised(new_job):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 32
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        job = new_job(8)
        for rank in range(8):
            job.start(rank, f"host {rank}")
        meetings = job.end()
        assert sum(len(meeting.links) for meeting in meetings) == 8 * 7 * 2
        for meeting in meetings:
            for stream in meeting.links.values():
                stream.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_launchers_name_of_the_job_is_kept(new_job):
    job = new_job(2)
    for rank in range(2):
        job.start(rank, job="khvdrun-17-5eed")
    assert [meeting.table.job for meeting in job.end()] == ["khvdrun-17-5eed"] * 2


def test_ranks_that_share_memory_are_on_one_host_and_need_no_links(new_job):
    job = new_job(3)
    for rank in range(3):
        job.start(rank)
    assert all(meeting.table.hosts() == [0, 0, 0] for meeting in job.end())
    assert all(meeting.links == {} for meeting in job.end())


def test_ranks_of_another_start_at_the_same_address_meet_anew(new_job):
    job = new_job(2)
    names = []
    for _ in range(3):
        for rank in range(2):
            job.start(rank, "ab"[rank])
        meetings = job.end()
        exchange_names(meetings)
        names.append(meetings[0].table.meeting)
    assert len(set(names)) == 3


def test_proofs_of_links_are_of_one_start_of_the_job(new_job, monkeypatch):
    keys = []

    class Recorded(ranks.Links):
        def __init__(self, *arguments):
            keys.append(arguments[3])
            super().__init__(*arguments)

    monkeypatch.setattr(ranks, "Links", Recorded)
    job = new_job(2)
    for _ in range(2):
        for rank in range(2):
            job.start(rank, "ab"[rank], job="khvdrun-17-5eed")
        exchange_names(job.end())
    assert keys[0] == keys[1] and keys[2] == keys[3]
    assert len({*keys, job.secret.key("khvdrun-17-5eed")}) == 3


def listening_at() -> set[str]:
    """The IPv4 addresses at which this process listens."""
    lines = pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]
    of_this = open_sockets()
    return {
        socket.inet_ntoa(bytes.fromhex(each[1].partition(":")[0])[::-1])
        for each in map(str.split, lines)
        if each[3] == "0A" and f"socket:[{each[9]}]" in of_this
    }


def open_sockets() -> set[str]:
    found = set()
    for path in pathlib.Path("/proc/self/fd").iterdir():
        # Other threads close theirs meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(path))
    return found


@pytest.mark.parametrize("interfaces", [(), ("lo",), ("no0", "lo")])
def test_they_listen_at_the_chosen_interface_only(new_job, interfaces):
    job = new_job(2)
    seen = []

    def look(rank, hosts):
        seen.append(listening_at())
        return []

    job.start(0, interfaces=interfaces, wanted_links=look)
    job.await_listening()
    seen.append(listening_at())
    job.start(1, interfaces=interfaces, wanted_links=look)
    job.end()
    assert seen == [{"127.0.0.1"}] * 3


def free_ports(count: int) -> range:
    """Successive ports that nobody has."""
    for first in range(20000 + os.getpid() % 1000, 30000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            for port in range(first, first + count):
                opened.enter_context(socket.create_server(("127.0.0.1", port)))
            return range(first, first + count)
    raise RuntimeError("no free ports")


def test_they_listen_at_the_chosen_ports_only(new_job, monkeypatch):
    ports = free_ports(3)
    monkeypatch.setenv("KERAS_HVD_PORTS", f"{ports[0]}-{ports[-1]}")
    job = new_job(3)
    for rank, key in enumerate("abc"):
        job.start(rank, key, interfaces=("lo",))
    table = job.end()[0].table
    # At IPv4 and IPv6.
    assert {each.port for one in table.ranks for each in one.addresses} == {*ports}


def test_too_few_ports_are_an_error_on_all(new_job, monkeypatch):
    ports = free_ports(2)
    monkeypatch.setenv("KERAS_HVD_PORTS", f"{ports[0]}-{ports[-1]}")
    job = new_job(3, timeout=2)
    for rank, key in enumerate("abc"):
        job.start(rank, key, interfaces=("lo",))
    errors = job.errors()
    found = f"have every port of KERAS_HVD_PORTS={ports[0]}-{ports[-1]}"
    assert sum(found in each for each in errors.values()) >= 1
    assert len(errors) == 3


def test_an_interface_that_no_host_has_is_an_error(new_job):
    job = new_job(1)
    job.start(0, interfaces=("no0",))
    assert "has no network interface 'no0'" in job.errors()[0]


# --- failures ------------------------------------------------------------------------


def test_a_missing_rank_is_named_on_all(new_job):
    job = new_job(4, timeout=1)
    for rank in (0, 2):
        job.start(rank)
    (error,) = set(job.errors().values())
    assert re.match(r"rank \d.* waited 1 s, and ranks 1 and 3 of 4 did not come", error)


def test_who_waited_longest_learns_who_is_missing_too(new_job):
    job = new_job(3, timeout=60)
    job.start(0)
    job.start(2, timeout=1)
    (error,) = set(job.errors().values())
    assert error.startswith("rank 2 waited ")
    assert "rank 1 of 3 did not come" in error


def test_without_rank_0_the_others_say_where_they_looked(new_job):
    job = new_job(2, timeout=1)
    job.start(1)
    assert re.match(
        rf"rank 1 could not reach rank 0 at {job.rendezvous} within 1 s: Connection "
        "refused. Start rank 0",
        job.errors()[1],
    )


def test_a_host_that_nobody_knows_is_an_error(new_job):
    job = new_job(2, timeout=0.2)
    job.start(0, rendezvous="no-such-host.invalid:29400")
    job.start(1, rendezvous="no-such-host.invalid:29400")
    errors = job.errors()
    assert "rank 0 cannot listen at no-such-host.invalid:29400" in errors[0]
    assert "rank 1 could not reach rank 0 at no-such-host.invalid:29400" in errors[1]


def test_a_rank_that_came_twice_is_an_error_on_all(new_job):
    job = new_job(3)
    for name, rank in (("first", 0), ("second", 1), ("twin", 1)):
        job.start(rank, name=name)
    (error,) = set(job.errors().values())
    assert re.match(r"rank 1 came twice, on .*, and on .*: give each rank a", error)


@pytest.mark.parametrize(("rank", "size"), [(1, 4), (3, 4)])
def test_another_size_is_an_error_on_all(new_job, rank, size):
    job = new_job(3)
    job.start(0)
    job.start(rank, size=size)
    (error,) = set(job.errors().values())
    expected = {
        1: r"rank 1, on .*: it was started as one of 4 ranks, and rank 0 as one of 3",
        3: r"rank 3 came, on .*, but rank 0 knows of 3 ranks: start all with the same",
    }
    assert re.match(expected[rank], error)


@pytest.mark.parametrize("encrypted", [0, 1])
def test_tls_on_one_rank_only_is_an_error_on_both(new_job, begin_tls, encrypted):
    job = new_job(2, timeout=60)
    for rank in range(2):
        job.start(rank, tls=begin_tls if rank == encrypted else None)
    errors = job.errors()
    for error in errors.values():
        assert re.fullmatch(
            rf"rank {encrypted}.* was started with TLS, and rank {1 - encrypted}.* "
            r"without: give khvdrun --tls \(or set KERAS_HVD_TLS=1\) on all hosts, or "
            "on none",
            error,
        )


def test_another_name_of_the_job_is_refused_at_once(new_job):
    job = new_job(2, timeout=60)
    job.start(0, job="one", timeout=1)
    job.start(1, job="other")
    assert "it has another secret, or another job's name" in job.errors()[1]


def test_equal_keys_of_different_machines_contradict_each_other(new_job, monkeypatch):
    told = iter(
        {"host_key": "key rack", "kernel": kernel, "user": 0} for kernel in "ab"
    )
    monkeypatch.setattr(rank_table, "identity", lambda key: next(told))
    job = new_job(2)
    for rank in range(2):
        job.start(rank, "rack")
    (error,) = set(job.errors().values())
    assert "have the same KERAS_HVD_HOST_KEY, but not the same machine" in error


def test_addresses_that_other_machines_cannot_reach_are_an_error(new_job, monkeypatch):
    told = iter({"host_key": kernel, "kernel": kernel, "user": 0} for kernel in "ab")
    monkeypatch.setattr(rank_table, "identity", lambda key: next(told))
    job = new_job(2)
    for rank in range(2):
        job.start(rank)
    (error,) = set(job.errors().values())
    assert "listens at 127.0.0.1, which other hosts cannot reach: name" in error


def test_a_taken_port_is_an_error_that_says_so(new_job):
    job = new_job(2, timeout=1)
    with socket.create_server(("127.0.0.1", job.port)):
        job.start(0)
        job.start(1)
        errors = job.errors()
    assert re.match(
        rf"rank 0 cannot listen at {job.rendezvous}: Address already in use. The "
        "rendezvous must be .* with a port that no other program has",
        errors[0],
    )
    assert "rank 1 could not reach rank 0" in errors[1]


def test_a_name_that_means_loopback_here_is_explained(new_job, monkeypatch):
    monkeypatch.setattr(
        address, "resolve", lambda name: [address.Address("127.0.0.1", name.port)]
    )
    job = new_job(2, timeout=0.2)
    job.start(0, rendezvous=f"node0:{job.port}")
    assert "Here node0 means 127.0.0.1, which other hosts cannot" in job.errors()[0]


def test_an_address_of_another_host_is_an_error_on_rank_0(new_job):
    job = new_job(2, timeout=0.7)
    job.start(0, rendezvous="203.0.113.1:29400")
    assert re.match(
        "rank 0 cannot listen at 203.0.113.1:29400: Cannot assign requested address. "
        "The rendezvous must be an address of the host where it runs, .* It tried for "
        "0.7 s",
        job.errors()[0],
    )


def test_a_name_may_become_that_of_this_host_later(new_job, monkeypatch):
    """Unknown first, then of the pod before this one, then right."""
    job = new_job(2)
    known = iter([None, "203.0.113.1", "127.0.0.1"])

    def resolve(name):
        if name.host != "node0":
            return [name]
        host = next(known)
        if host is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [address.Address(host, name.port)]

    monkeypatch.setattr(address, "resolve", resolve)
    job.start(0, rendezvous=f"node0:{job.port}")
    job.start(1)
    assert len(job.end()) == 2
    assert next(known, "all were asked for") == "all were asked for"


def test_rank_0_says_how_many_connections_carry_tensors(new_job):
    job = new_job(2)
    for rank, count in enumerate((3, 2)):
        job.start(rank, key=str(rank), data_connections=count)
    first, second = (meeting.links for meeting in job.end())
    data = [Link(1, Purpose.DATA, number) for number in range(3)]
    assert {*first} == {Link(1, Purpose.CONTROL), *data}
    for link, stream in first.items():
        stream.socket.sendall(f"{link.purpose} {link.number}".encode())
    for link, stream in second.items():
        with stream.socket as received:
            received.setblocking(True)
            assert received.recv(10) == f"{link.purpose} {link.number}".encode()
    for stream in first.values():
        stream.close()


def test_where_mpi_carries_tensors_no_connections_do(new_job):
    job = new_job(2)
    for rank in range(2):
        job.start(rank, key=str(rank), mpi=True)
    for meeting in job.end():
        assert meeting.table.mpi
        assert {link.purpose for link in meeting.links} == {Purpose.CONTROL}
        for stream in meeting.links.values():
            stream.close()


def test_ranks_that_differ_in_what_carries_tensors_are_told(new_job):
    job = new_job(2)
    for rank, mpi in enumerate((True, False)):
        job.start(rank, key=str(rank), mpi=mpi)
    (error,) = set(job.errors().values())
    assert re.search(
        r"rank 1 .* wants TCP to carry tensors .*, and rank 0 wants MPI: give all "
        "ranks the same KERAS_HVD_CPU_OPERATIONS",
        error,
    )


def test_a_link_that_only_one_side_wants_is_an_error_on_all(new_job):
    job = new_job(2, timeout=1)
    job.start(0, wanted_links=lambda rank, hosts: [])
    job.start(1, wanted_links=lambda rank, hosts: [Link(0, Purpose.DATA)])
    (error,) = set(job.errors().values())
    assert re.search(r"rank 1.* no connection to rank 0 \(process \d+ on ", error)
    assert "firewalls must let these ranks connect" in error


def test_a_link_that_nobody_makes_is_an_error_on_all(new_job):
    job = new_job(2, timeout=1)
    job.start(0, wanted_links=lambda rank, hosts: [Link(1, Purpose.DATA)])
    job.start(1, wanted_links=lambda rank, hosts: [])
    (error,) = set(job.errors().values())
    assert "no connection with rank 1 (process" in error


# A rank of its own process, which may be of another version, or end too early.
RANK = """
import os, sys
from keras_hvd.world.rendezvous import address, gathering, proof, ranks, secret
exec(sys.argv[3])
place = ranks.RankIdentity(int(sys.argv[1]), 2, 0, 1)
point = ranks.MeetingPoint(
    [address.parse(sys.argv[2])], secret.Secret(b"only these tests know")
)
try:
    ranks.meet(place, point, links, timeout=20)
except gathering.RendezvousError as error:
    sys.exit(str(error))
"""
OTHER_VERSION = "gathering.__version__ = proof.__version__ = '9.9.9'; links = None"
EARLY_END = "links = lambda rank, hosts: os._exit(7)"


def start_process(rank: int, rendezvous: str, change: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", RANK, str(rank), rendezvous, change],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_another_version_is_named_on_both_sides(new_job, rank):
    job = new_job(2)
    with start_process(rank, job.rendezvous, OTHER_VERSION) as other:
        job.start(1 - rank)
        (error,) = job.errors().values()
        others = other.communicate()[1]
    assert re.search(
        rf"rank {rank}.* runs keras_hvd 9.9.9, and rank {1 - rank} {__version__}: "
        "install the same version on all hosts",
        error,
    )
    assert re.search(
        rf"rank {1 - rank}.* runs keras_hvd {__version__}, and rank {rank} 9.9.9: "
        "install the same version on all hosts",
        others,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_too_early_is_an_error_on_the_others(new_job, rank):
    job = new_job(2)
    with start_process(rank, job.rendezvous, EARLY_END) as other:
        job.start(1 - rank)
        (error,) = job.errors().values()
    assert other.returncode == 7
    assert re.match(rf"rank {rank}.* ended while the job was starting", error)
