"""Hosts that vanish from the network, or seem to: each is a network namespace here."""

import json
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

LIMIT = 2.0  # seconds without an answer
DEFAULT_LIMIT = 4.0
MARGIN = 2.0
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "failures.md"
RANKS = str(pathlib.Path(__file__).parent / "ranks")

# TensorFlow takes long to import. A rank prints a line for each event.
RANK = """
import json, sys, time
from allreduce_loop import allreduce
import keras_hvd
from keras_hvd.job import native

def say(what, text=""):
    print(json.dumps([what, time.monotonic(), text]), flush=True)

deed, steps = sys.argv[1], int(sys.argv[2])
keras_hvd.init()
try:
    allreduce("first", 1)
    say("started")
    if deed == "idle":
        while not native.engine().khvd_failure():
            time.sleep(0.05)
        allreduce("after it", 1)
    for step in range(steps):
        allreduce("step", 16 << 20)
    say("done")
except keras_hvd.KerasHvdError as error:
    say("raised", str(error))
"""


def ip(*arguments: object) -> None:
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True)


class Network:
    """Hosts on one switch, all of them namespaces of this machine."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.count = 0
        ip("netns", "add", self.name_of("s"))
        self.in_switch("link", "add", "bridge", "type", "bridge")
        self.in_switch("link", "set", "bridge", "up")

    def name_of(self, host: object) -> str:
        return f"khvd{self.mark}{host}"

    def in_switch(self, *arguments: object) -> None:
        ip("-n", self.name_of("s"), *arguments)

    def add_host(self) -> int:
        host, self.count = self.count, self.count + 1
        name = self.name_of(host)
        ip("netns", "add", name)
        port = ("netns", self.name_of("s"))
        ip("-n", name, "link", "add", "up0", "type", "veth", "peer", f"p{host}", *port)
        self.in_switch("link", "set", f"p{host}", "master", "bridge", "up")
        ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "up0")
        ip("-n", name, "link", "set", "up0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        return host

    def cut(self, host: int) -> None:
        """Pulls a host's cable out, at the switch."""
        self.in_switch("link", "set", f"p{host}", "down")

    def part(self, *hosts: int) -> None:
        """Keeps these hosts from each other; others reach them."""
        for host in hosts:
            options = ("type", "bridge_slave", "isolated", "on")
            self.in_switch("link", "set", f"p{host}", *options)

    def remove(self) -> None:
        for host in ("s", *range(self.count)):
            subprocess.run(["ip", "netns", "del", self.name_of(host)], check=False)


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        found = Network(str(os.getpid()))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot make network namespaces: {error}")
    yield found
    found.remove()


class Rank:
    """A rank on a host, and its lines."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def line(self) -> tuple[str, float, str]:
        return tuple(json.loads(self.process.stdout.readline()))

    def pid(self) -> int:
        """The process of `ip netns exec`, which has become the rank's."""
        return self.process.pid


StartJob = Callable[..., list[Rank]]


@pytest.fixture
def start(network: Network, tmp_path: pathlib.Path) -> Iterator[StartJob]:
    """Starts a job: two ranks on each of some hosts, which are new ones."""
    started: list[Rank] = []

    def start(
        hosts: int, deed: str, steps: int, per_host: int = 2, limit: float = LIMIT
    ) -> list[Rank]:
        size = hosts * per_host
        ranks: list[Rank] = []
        numbers = [network.add_host() for _ in range(hosts)]
        for host in numbers:
            for local in range(per_host):
                place = {
                    "RANK": len(ranks),
                    "SIZE": size,
                    "LOCAL_RANK": local,
                    "LOCAL_SIZE": per_host,
                    "RENDEZVOUS": f"10.77.0.{numbers[0] + 1}:29400",
                    "SECRET": "0123456789abcdef of tests",
                }
                if limit != DEFAULT_LIMIT:
                    place["HOST_TIMEOUT_SECONDS"] = int(limit)
                environment = {f"KERAS_HVD_{k}": str(v) for k, v in place.items()}
                ranks.append(
                    Rank(
                        subprocess.Popen(
                            ["ip", "netns", "exec", network.name_of(host)]
                            + [sys.executable, "-c", RANK, deed, str(steps)],
                            env={**os.environ, **environment, "PYTHONPATH": paths()},
                            stdout=subprocess.PIPE,
                            text=True,
                        )
                    )
                )
                started.append(ranks[-1])
        assert [rank.line()[0] for rank in ranks] == ["started"] * size
        return ranks

    yield start
    for rank in started:
        rank.process.kill()
        rank.process.communicate()


def paths() -> str:
    return os.pathsep.join([RANKS, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.parametrize("deed", ["busy", "idle"])
@pytest.mark.parametrize(
    ("hosts", "victim", "limit"),
    [(2, 0, LIMIT), (2, 1, LIMIT), (3, 0, LIMIT), (3, 1, DEFAULT_LIMIT)],
)
def test_a_host_that_vanishes_is_known_in_time(
    network, start, hosts, victim, limit, deed
):
    ranks = start(hosts, deed, steps=1000, limit=limit)
    time.sleep(1)  # any moment will do: the ranks are busy, or idle, until it comes
    network.cut(victim)
    cut = time.monotonic()
    said = [rank.line() for rank in ranks]
    assert {what for what, _, _ in said} == {"raised"}
    host_name = socket.gethostname()
    reached = [said[r] for r in range(2 * hosts) if r // 2 != victim]
    for _, when, text in reached:
        assert when - cut < limit + MARGIN, said
        assert (
            f"rank {2 * victim} (pid {ranks[2 * victim].pid()} on {host_name}) " in text
        )
        assert "cannot be reached" in text
        assert f"for {int(limit)} s. See whether that host runs" in text
        if limit == DEFAULT_LIMIT:
            assert without_process(text).partition(": ")[2] in without_process(
                " ".join(PAGE.read_text().split())
            )
    assert len({text.partition(": ")[2] for _, _, text in reached}) == 1
    for rank in (2 * victim, 2 * victim + 1):
        _, when, text = said[rank]
        assert when - cut < limit + MARGIN, said
        assert "reach" in text


def without_process(text: str) -> str:
    return re.sub(r"\(pid \d+ on \S+\)", "", text)


# Nothing but tensors travels between these two.
def test_two_hosts_that_do_not_reach_each_other_are_named(network, start):
    ranks = start(3, "busy", steps=1000)
    network.part(1, 2)
    parted = time.monotonic()
    said = [rank.line() for rank in ranks]
    here = socket.gethostname()
    one, other = (f"rank {n} (pid {ranks[n].pid()} on {here})" for n in (2, 4))
    for what, when, text in said:
        assert what == "raised"
        # Another second, for a better reason than a connection that has ended.
        assert when - parted < LIMIT + 1 + MARGIN, said
        assert f"the hosts of {one} and {other} do not reach each other" in text
        assert f"for {int(LIMIT)} s. See whether the network between" in text


# Much longer than a host may be silent. Its kernel answers in its place.
def test_a_stopped_rank_is_not_taken_for_a_vanished_host(start):
    # One in each place, each in a job of its own, so that they are silent at once.
    jobs = []
    for place in range(4):
        # So many that none has ended before the signal comes.
        jobs.append(start(2, "busy", steps=16))
        os.kill(jobs[place][place].pid(), signal.SIGSTOP)
    said = [rank.process.stdout for ranks in jobs for rank in ranks]
    assert select.select(said, [], [], 3 * LIMIT) == ([], [], [])
    for place, ranks in enumerate(jobs):
        os.kill(ranks[place].pid(), signal.SIGCONT)
    for ranks in jobs:
        assert [rank.line()[0] for rank in ranks] == ["done"] * 4
