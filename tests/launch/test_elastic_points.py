"""A rank ends at any point while a job is formed anew: the others go on without it.

With libraries that were built for it (`--faults`, as in `make soak`) that is right
before each store that other ranks act on, and around each send to other hosts;
otherwise at each call on a socket in Python. All follows from `--seed`, except the
scheduling of the processes.
"""

import json
import math
import random
import re
import sys
from pathlib import Path

import network
import pytest

SCRIPT = Path(__file__).parent / "ranks" / "elastic_points.py"
AGAIN = "--blacklist-cooldown-range", 0, 0
# The first ones are in forming the job, the last ones in its steps.
ENGINE_POINTS, SOCKET_POINTS = 300, 60


@pytest.fixture(params=["sockets", "engine"])
def chance(request, seed, faults, forming_kill):
    """What chooses, and how a point is told to ranks."""
    if request.param == "engine" and faults is None:
        pytest.skip("needs libraries with faults: make soak")
    is_engine = request.param == "engine"
    chance = random.Random(f"{request.node.name} {seed}")
    points = ENGINE_POINTS if is_engine else SOCKET_POINTS
    # Each number is as likely as its half.
    chance.point = int(math.exp(chance.uniform(0, math.log(points))))
    chance.engine = ("--engine", faults) if is_engine else ()
    return chance


@pytest.fixture(params=[1, 2])
def run(request, khvdrun, tmp_path, two_hosts):
    """Runs the script on four ranks; returns what khvdrun said."""
    given, on = (), None
    if request.param == 2:
        agent = network.agent(two_hosts, tmp_path / "agent")
        places = ",".join(f"{host.address}:2" for host in two_hosts)
        given, on = ("-H", places, "--launch-agent", agent), two_hosts[0]

    def run(chance, first, following, ends_with, *words, options=(), **variables):
        point, least = chance.point, min(2, ends_with)
        ended = khvdrun.run(
            *("-np", 4, "--min-np", least, *given, *options),
            *(sys.executable, SCRIPT, tmp_path, first, following, point),
            *(*chance.engine, "--ends-with", ends_with, *words),
            timeout=200,
            on=on,
            env=variables,
        )
        what = f"{first}, then {following} at {point} {words}:\n{ended.stderr}"
        assert ended.returncode == 0, what
        check_counts(tmp_path, ends_with, what)
        if on is not None:
            for host in two_hosts:
                host.run("sh", "-c", 'test -z "$(ls -A /dev/shm)"')
        return ended.stderr

    return run


def check_counts(folder, ranks, what):
    """No step is lost, and none is made twice."""
    seen = [json.loads(each.read_text()) for each in folder.glob("*.json")]
    assert sorted(each["rank"] for each in seen) == [*range(ranks)], what
    for each in seen:
        assert each["size"] == ranks, what
        assert each["steps"] == [*range(len(seen[0]["steps"]))], what


def test_one_more_is_killed(run, chance):
    first, following = chance.sample(range(4), 2)
    run(chance, first, following, 2)


def test_two_more_are_killed(run, chance):
    first, *others = chance.sample(range(4), 3)
    run(chance, first, ",".join(map(str, others)), 1)


def test_one_that_comes_is_killed(run, chance):
    """Another one comes in its place."""
    first = chance.randrange(4)
    run(chance, first, f"{first}new", 4, options=AGAIN)


def test_who_sends_the_state_to_one_that_comes_is_killed(run, chance):
    first = chance.randrange(4)
    sender = 0 if first else 1
    words = "--leaves", 2, "--elements", 1 << 18
    run(chance, first, sender, 4, *words, options=AGAIN)


def test_one_that_is_stopped_is_dropped(run, chance):
    first, following = chance.sample(range(4), 2)
    stalls = {
        "KERAS_HVD_STALL_WARNING_SECONDS": "1",
        "KERAS_HVD_STALL_ABORT_SECONDS": "10",
    }
    options = ("--elastic-timeout", 10)
    said = run(chance, first, following, 2, "--how", "stops", options=options, **stalls)
    assert re.search(rf"khvdrun: rank {following} \(.*: it is killed\n", said), said


def test_a_host_vanishes(chance, khvdrun, hosts, by_ssh, tmp_path):
    """With the rank that the others wait for, or that waits for them."""
    if chance.engine:
        pytest.skip("its cable is pulled in Python")
    places = ",".join(
        f"{host.address}:{2 if n == 0 else 1}" for n, host in enumerate(hosts)
    )
    options = "-np", 4, "--min-np", 2, "-H", places, "--elastic-timeout", 10
    words = SCRIPT, tmp_path, chance.randrange(2), 2, chance.point
    ends = "--how", "unplugs", "--ends-with", 2
    try:
        ended = khvdrun.run(
            *options, sys.executable, *words, *ends, on=hosts[0], env=by_ssh
        )
    finally:
        hosts[1].plug_in()
    khvdrun.wait_until_gone()
    assert ended.returncode == 0, ended.stderr
    check_counts(tmp_path, 2, ended.stderr)
