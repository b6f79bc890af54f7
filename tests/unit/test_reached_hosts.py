"""Hosts that khvdrun reaches by a command, which may say nothing or much."""

import os
import shlex
import sys
import time

import pytest

from keras_hvd.launch import reached_hosts
from keras_hvd.launch.reached_hosts import ReachedHosts
from keras_hvd.version import __version__

STARTS_NO_RANK = ("node1", "node1 starts no rank", 255 << 8)

# What a host says first.
SAYS = """
import json, sys
print("Welcome to", end="")
print("\\n" + json.dumps({"version": sys.argv[1]}))
"""


@pytest.fixture
def reach():
    """Starts a rank by a command; returns what was told of the host, and its loss."""

    def reach(*command):
        hosts, told, lost = ReachedHosts(command, os.environ), [], []

        async def on_told(host, message):
            told.append(message)

        hosts.on_told, hosts.on_lost = on_told, lambda *how: lost.append(how)
        hosts.start("node1", 1, 2)
        since = time.monotonic()
        while not lost:
            hosts.loop.poll()
            assert time.monotonic() - since < 20
        assert not hosts.reached
        return told, lost[0]

    return reach


def test_a_host_is_not_waited_for_for_ever(reach, monkeypatch):
    monkeypatch.setattr(reached_hosts, "_LOGIN_SECONDS", 0.5)
    since = time.monotonic()
    assert reach("sh", "-c", "sleep 1000") == ([], STARTS_NO_RANK)
    assert time.monotonic() - since >= 0.5


def test_a_command_that_ends_has_not_reached_it(reach):
    assert reach("false") == ([], STARTS_NO_RANK)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (__version__, "is not connected any more"),
        (
            "0.0.1",
            f"has keras_hvd 0.0.1, and this host {__version__}: install the same on "
            "all hosts",
        ),
    ],
)
def test_it_is_said_how_far_it_has_come(reach, version, why):
    """Text of a login comes before the first message."""
    said = shlex.join([sys.executable, "-c", SAYS, version])
    told, lost = reach("sh", "-c", said)
    assert told[0] == {"text": "Welcome to\n"}
    assert lost == ("node1", f"node1 {why}", 255 << 8)
