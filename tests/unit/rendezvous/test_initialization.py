"""The engine's options when ranks of several hosts have met.

Each rank is a process with a stand-in for the engine, which sends names through the
links that it gets.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
SECRET = "0123456789abcdef of tests"

RANK = """
import ctypes, gc, json, os, socket, sys, types
from keras_hvd.world import initialization
from keras_hvd.job import basics, native

def links(rank, size, hosts, links, capacity):
    found = [(p, 1) for p in range(size) if hosts[p] != hosts[rank]]
    for at, (links_peer, purpose) in enumerate(found[:capacity]):
        links[at].peer, links[at].purpose, links[at].fd = links_peer, purpose, -1
    return len(found)

def init(pointer):
    options = pointer._obj
    size = options.size
    shown = {name: getattr(options, name) for name, *_ in options._fields_[:7]}
    shown["job"] = options.job.decode()
    shown["hosts"] = options.hosts[:size] if options.hosts else None
    shown["names"] = [options.host_names[r].decode() for r in range(size)
                      if options.hosts]
    shown["pids"] = options.pids[:size] if options.hosts else None
    given = {options.links[at].fd for at in range(options.link_count)}
    shown["kept"] = [one.fileno() for one in gc.get_objects()
                     if isinstance(one, socket.socket) and one.fileno() in given]
    ends = [(options.links[at].peer, options.links[at].purpose,
             socket.socket(fileno=options.links[at].fd))
            for at in range(options.link_count)]
    for peer, purpose, end in ends:
        end.setblocking(True)
        end.sendall(f"{options.rank}>{peer}\\n".encode())
    shown["got"] = [end.makefile().readline().strip() for _, _, end in ends]
    shown["secret"] = os.environ.get("KERAS_HVD_SECRET")
    print(json.dumps(shown), flush=True)
    os._exit(0)

engine = types.SimpleNamespace(
    khvd_links=links, khvd_init=init, khvd_is_initialized=lambda: 0,
    khvd_get_counters=lambda counters: 2, khvd_last_error=lambda: b"not so far",
    khvd_failure=lambda: b"",
)
native.engine = lambda: engine
try:
    initialization.init()
except RuntimeError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def start(rank: int, port: int, **variables: str) -> subprocess.Popen:
    place = {
        "RANK": rank,
        "SIZE": 3,
        "LOCAL_RANK": 0,
        "LOCAL_SIZE": 1,
        "RENDEZVOUS": f"127.0.0.1:{port}",
        "SECRET": SECRET,
        **variables,
    }
    return subprocess.Popen(
        [sys.executable, "-c", RANK],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **{f"KERAS_HVD_{name}": str(value) for name, value in place.items()},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def shown_by(started: list[subprocess.Popen]) -> list[dict]:
    """The options of the engines, by rank."""
    ended = [process.communicate(timeout=60) for process in started]
    return [json.loads(out) for out, _ in ended]


def test_the_engine_gets_the_table_and_connected_links(new_job):
    port = new_job(3).port
    started = [
        start(rank, port, HOST_KEY=key, LOCAL_RANK=local, LOCAL_SIZE=2)
        for rank, (key, local) in enumerate((("a", 0), ("b", 0), ("a", 1)))
    ]
    shown = shown_by(started)
    for rank, one in enumerate(shown):
        assert one["hosts"] == [0, 1, 0]
        assert one["pids"] == [process.pid for process in started]
        assert one["names"] == [os.uname().nodename] * 3
        peers = [peer for peer in range(3) if (peer == 1) != (rank == 1)]
        assert sorted(one["got"]) == [f"{peer}>{rank}" for peer in peers]
        # The engine alone closes them.
        assert one["kept"] == []
        # Processes that it starts do not know it.
        assert one["secret"] is None
    assert len({one["job"] for one in shown}) == 1
    assert [(one["cross_rank"], one["cross_size"]) for one in shown] == [
        *((0, 2), (1, 2), (0, 1))
    ]
    assert [(one["local_rank"], one["local_size"]) for one in shown] == [
        *((0, 2), (0, 2), (1, 2))
    ]


def test_on_one_host_the_engine_gets_no_links(new_job):
    port = new_job(3).port
    shown = shown_by(
        [start(rank, port, LOCAL_RANK=rank, LOCAL_SIZE=3) for rank in range(3)]
    )
    assert all(one["hosts"] == [0, 0, 0] and one["got"] == [] for one in shown)
    assert len({one["job"] for one in shown}) == 1
    assert all((one["cross_rank"], one["cross_size"]) == (0, 1) for one in shown)


@pytest.mark.parametrize(
    ("secret", "expected"),
    [("", "a job on several hosts needs a secret"), ("short", "has 5 bytes, and ne")],
)
def test_without_a_secret_no_rank_looks_for_others(new_job, secret, expected):
    with start(1, new_job(3).port, SECRET=secret) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error.startswith("RendezvousError: ")
    assert expected in error
