"""After a loss, weights are to the bit those of a job that began with those left.

`make soak` tries more ways than `make test`.
That one begins from the state that the first of them had committed, at its step.
"""

import json
import sys
from pathlib import Path

import network
import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "ranks" / "elastic_bits.py"
# The last commit before the loss in step 3: epochs have two.
COMMITTED = {"graph": 3, "xla": 3, "fit": 2}


@pytest.fixture
def train(khvdrun, tmp_path):
    """Runs the script; returns how its ranks began in each job, and what they have."""

    def train(name, options, *words, on=None):
        folder = tmp_path / name
        folder.mkdir()
        command = sys.executable, SCRIPT, folder, *words
        ended = khvdrun.run(*options, "--min-np", 2, *command, timeout=200, on=on)
        assert ended.returncode == 0, ended.stderr
        began = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
        ends = [dict(np.load(folder / f"end-{rank}.npz")) for rank in (0, 1)]
        return began, ends

    return train


def check(way, broken, fresh):
    (began, ends), (fresh_began, fresh_ends) = broken, fresh
    assert began == [[[3, 0], [2, COMMITTED[way]]]] * 2
    assert fresh_began == [[[2, COMMITTED[way]]]] * 2
    for end, of_fresh in zip(ends, fresh_ends, strict=True):
        assert end.keys() == of_fresh.keys()
        for name, value in end.items():
            assert np.array_equal(value, of_fresh[name]), (name, value.shape)


@pytest.fixture
def in_soak(is_soak):
    if not is_soak:
        pytest.skip("others show it as well: make soak")


@pytest.mark.parametrize("way, dies", [("graph", 0), ("xla", 1)])
def test_on_one_host(train, tmp_path, way, dies):
    check_on_one_host(train, tmp_path, way, dies)


@pytest.mark.parametrize("way, dies", [("graph", 2), ("fit", 1)])
def test_more_ways_on_one_host(in_soak, train, tmp_path, way, dies):
    check_on_one_host(train, tmp_path, way, dies)


def check_on_one_host(train, tmp_path, way, dies):
    broken = train("broken", ("-np", 3), way, dies)
    first = min({0, 1, 2} - {dies})
    committed = tmp_path / "broken" / f"{first}-{COMMITTED[way]}.npz"
    check(way, broken, train("fresh", ("-np", 2), way, committed))


def test_on_two_hosts(train, two_hosts, tmp_path):
    check_on_two_hosts(train, two_hosts, tmp_path, "fit")


def test_another_way_on_two_hosts(in_soak, train, two_hosts, tmp_path):
    check_on_two_hosts(train, two_hosts, tmp_path, "graph")


def check_on_two_hosts(train, two_hosts, tmp_path, way):
    agent = "--launch-agent", network.agent(two_hosts, tmp_path / "agent")
    first, second = (host.address for host in two_hosts)
    options = "-np", 3, "-H", f"{first}:2,{second}:1", *agent
    broken = train("broken", options, way, 0, on=two_hosts[0])
    committed = tmp_path / "broken" / f"1-{COMMITTED[way]}.npz"
    options = "-np", 2, "-H", f"{first}:1,{second}:1", *agent
    check(way, broken, train("fresh", options, way, committed, on=two_hosts[0]))
