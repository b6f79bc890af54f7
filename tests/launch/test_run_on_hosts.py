"""`keras_hvd.run(hosts=)`: the function and its results travel between hosts.

Hosts are network namespaces here, which mpirun reaches by an agent of the tests.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import mpi_in_path
import network
import pytest
from mpi_in_path import Mpi, debians_open_mpi

import keras_hvd

RANKS = Path(__file__).parent / "ranks"

# A process that calls `run` on the first host, and prints the outcomes. TensorFlow
# takes long to import.
CALLS = """
import ctypes, json, os, pathlib, signal, socket, sys, time
import keras_hvd

ranks, hosts, mpi_args, *names = sys.argv[1:]
sys.path.append(ranks)
from allreduce_loop import SUM, allreduce, reduce_in_place
note = sys.argv[0] + ".note"

def kill_this_rank():
    # All processes here share a clock.
    pathlib.Path(note).write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)

def place(greeting, last=""):
    keras_hvd.init()
    total = (ctypes.c_int32 * 1000)(*[2 ** keras_hvd.rank()] * 1000)
    reduce_in_place("total", total, SUM)
    told = [name for name in os.environ if name.startswith("KERAS_HVD_CALLER")]
    threads = os.environ["TF_NUM_INTRAOP_THREADS"], os.environ["OMP_NUM_THREADS"]
    ranks = keras_hvd.rank(), keras_hvd.size(), keras_hvd.local_size()
    whole = set(total)
    for name in ("rank", "size", "local_rank", "local_size"):
        own = getattr(keras_hvd, name)()
        assert os.environ[f"HOROVOD_{name.upper()}"] == str(own), name
    return greeting + last, *ranks, socket.gethostname(), *whole, told, threads

def fill():
    rank = keras_hvd.environment.world().rank
    return bytes([rank]) * (20_000_000 * rank)

def fail():
    keras_hvd.init()
    if keras_hvd.rank() == 2:
        raise LookupError("of rank 2")
    allreduce("never", 1)

def die():
    if keras_hvd.environment.world().rank == 2:
        kill_this_rank()
    while True:
        signal.pause()

def die_in_the_job():
    keras_hvd.init()
    allreduce("first", 1)
    if keras_hvd.rank() == 2:
        kill_this_rank()
    allreduce("never", 1)

def generate():
    rank = keras_hvd.environment.world().rank
    return (number for number in "a") if rank == 2 else rank

def look_for_the_secret():
    own = pathlib.Path("/proc/self/environ").read_bytes().split(b"\\0")
    (secret,) = [one[24:] for one in own if b"KERAS_HVD_CALLER_SECRET=" in one]
    seen = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            seen.append((process / "cmdline").read_bytes())
        except OSError:
            pass
    lines = b"".join(seen)
    return len(secret), note.encode()[:-5] in lines, secret in lines

def loop():
    keras_hvd.init()
    allreduce("first", 1)
    if keras_hvd.rank() == 0:
        print("looping", flush=True)
    while True:
        allreduce("again", 1)

for name in names:
    given = {"args": ("it",), "kwargs": {"last": "!"}} if name == "place" else {}
    said = {}
    try:
        result = keras_hvd.run(
            globals()[name], **given, np=3, hosts=hosts, mpi_args=mpi_args,
            network_interfaces="cable", start_timeout=20,
        )
        if name == "fill":
            result = [[len(one), one.count(rank)] for rank, one in enumerate(result)]
        said["result"] = result
    except Exception as error:
        cause = error.__cause__
        said["error"] = type(error).__name__, str(error)
        said["cause"] = cause and [cause.rank, cause.host, str(cause)]
    if name.startswith("die"):
        killed = float(pathlib.Path(note).read_text())
        said["seconds"] = time.monotonic() - killed
    print(json.dumps({"outcome": said}), flush=True)
"""


@pytest.fixture(params=mpi_in_path.EACH, ids=mpi_in_path.NAMES)
def any_mpi(request, tmp_path) -> Mpi:
    """Each MPI whose options differ."""
    return request.param(tmp_path)


@pytest.fixture
def start(khvdrun, tmp_path):
    """Starts a process that calls `run` with these functions, one after another."""
    (tmp_path / "calls.py").write_text(CALLS)

    def start(mpi: Mpi, hosts: list[network.Host], *names: str, **told: str):
        mpi_in_path.write_agent(hosts, tmp_path)
        first, second = (host.address for host in hosts)
        named = f"{first}:2,{second}:1"
        words = (tmp_path / "calls.py", RANKS, named, mpi.mpi_args, *names)
        return subprocess.Popen(
            hosts[0].command([sys.executable, *words]),
            env={
                **os.environ,
                **mpi.environment,
                "KERAS_HVD_TEST_MARK": khvdrun.mark,
                **told,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def run(start):
    """The outcomes of these calls."""

    def run(*arguments, **told) -> list[dict]:
        with start(*arguments, **told) as process:
            try:
                out, err = process.communicate(timeout=120)
            finally:
                process.kill()
        print(out, err)
        assert process.returncode == 0
        return outcomes(out)

    return run


def outcomes(out: str) -> list[dict]:
    lines = [line for line in out.splitlines() if line.startswith('{"outcome"')]
    return [json.loads(line)["outcome"] for line in lines]


def test_results_come_in_the_order_of_ranks_and_again(any_mpi, two_hosts, run):
    cores = len(os.sched_getaffinity(0))
    both = [str(max(1, cores // 2))] * 2
    first, second = run(any_mpi, two_hosts, "place", "fill")
    assert first["result"] == [
        ["it!", 0, 3, 2, "host0", 7, [], both],
        ["it!", 1, 3, 2, "host0", 7, [], both],
        ["it!", 2, 3, 1, "host1", 7, [], [str(cores)] * 2],
    ]
    assert second["result"] == [[n, n] for n in (0, 20_000_000, 40_000_000)]


def test_an_exception_comes_with_its_rank_host_and_traceback(any_mpi, two_hosts, run):
    failed, refused = run(any_mpi, two_hosts, "fail", "generate")
    assert failed["error"] == ["LookupError", "of rank 2"]
    rank, host, text = failed["cause"]
    assert (rank, host) == (2, "host1")
    assert text.startswith("on rank 2 on host1:\nTraceback (most recent call last):\n")
    assert 'raise LookupError("of rank 2")' in text
    kind, text = refused["error"]
    assert kind == "TypeError"
    assert re.match("the result cannot be pickled: .*generator", text)
    assert refused["cause"][:2] == [2, "host1"]


def test_a_rank_that_is_killed_is_named_in_time(any_mpi, two_hosts, run):
    for died in run(any_mpi, two_hosts, "die", "die_in_the_job"):
        kind, text = died["error"]
        assert kind == "RankFailedError"
        assert re.search(
            # Its launcher ends the others soon, and may be faster than the news.
            r"\brank 2 on host1\b.* ended before the function had returned"
            r"|rank 2 \(pid \d+ on host1\) (was killed by SIGKILL|has gone without)",
            text,
        )
        assert died["seconds"] < 12


def test_the_secret_is_on_no_command_line_and_in_no_output(any_mpi, two_hosts, run):
    (found,) = run(any_mpi, two_hosts, "look_for_the_secret")
    assert found["result"] == [[64, True, False]] * 3


def test_what_travels_can_be_encrypted(two_hosts, run, tmp_path):
    mpi = debians_open_mpi(tmp_path)
    (found,) = run(mpi, two_hosts, "fill", KERAS_HVD_TLS="1")
    assert found["result"] == [[n, n] for n in (0, 20_000_000, 40_000_000)]


def test_a_host_that_cannot_be_reached_is_an_error(
    any_mpi, two_hosts, start, monkeypatch
):
    def write_agent(_, folder):
        agent = folder / "agent"
        # The message is ssh's.
        agent.write_text(
            "#!/bin/sh\necho 'ssh: connect to host: No route to host' >&2\nexit 255\n"
        )
        agent.chmod(0o755)

    monkeypatch.setattr(mpi_in_path, "write_agent", write_agent)
    with start(any_mpi, two_hosts, "generate") as process:
        out, err = process.communicate(timeout=60)
    (found,) = outcomes(out)
    assert found["error"][0] == "RankFailedError"
    assert re.match(
        "ranks 0, 1, 2, without a word, ended before the function .*; khvdrun ended",
        found["error"][1],
    )
    # MPICH's mpirun does not always pass on its agent's output.
    is_mpich = any_mpi.name == "MPICH"
    assert "No route to host" in err or (is_mpich and "Launch proxy failed" in err)


def test_a_host_that_is_cut_off_ends_the_call(start, khvdrun, tmp_path):
    mpi = debians_open_mpi(tmp_path)
    if why := network.unavailable():
        pytest.skip(f"there can be no hosts: {why}")
    with network.connected(2) as hosts, start(mpi, hosts, "loop") as process:
        assert process.stdout.readline() == "[0] looping\n"
        hosts[1].unplug()
        cut = time.monotonic()
        out, _ = process.communicate(timeout=60)
        # Open MPI's own mpirun would wait for the host.
        assert time.monotonic() - cut < 30
    (found,) = outcomes(out)
    assert re.search("rank 2 .* cannot be reached", found["error"][1])
    assert found["cause"][1] == "host0"


def test_an_interrupt_ends_all_ranks(two_hosts, start, khvdrun, tmp_path):
    with start(debians_open_mpi(tmp_path), two_hosts, "loop") as process:
        assert process.stdout.readline() == "[0] looping\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert err.rstrip().endswith("KeyboardInterrupt")
    khvdrun.wait_until_gone()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": "a:2,b;c:1"}, "'b;c' in 'b;c:1' is not the name of a host"),
        ({"hosts": "a:1,b:1"}, "-np 3 asks for more processes than the 2 slots"),
        ({"hosts": "a:3", "hostfile": "f"}, "give one of them"),
        ({"hosts": "a:3", "ssh_port": 65536}, "'65536' is not a port"),
        (
            {"network_interface": "a", "network_interfaces": "b"},
            "network_interface and network_interfaces mean the same",
        ),
    ],
)
def test_refuses_wrong_arguments_before_anything_starts(arguments, message, capfd):
    with pytest.raises(ValueError, match=re.escape(message)):
        keras_hvd.run(print, ("never",), np=3, **arguments)
    assert capfd.readouterr() == ("", "")


def test_says_what_to_install_where_no_mpirun_is(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="install Open MPI or MPICH on all hosts"):
        keras_hvd.run(print, ("never",), np=3, hosts="a:2,b:1")
    assert capfd.readouterr() == ("", "")


def test_this_host_alone_needs_no_mpirun(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = keras_hvd.run(os.getppid, np=2, hosts=f"{socket.gethostname()}:2")
    assert len(found) == 2
