"""keras_hvd.run(min_np=) on several hosts, which come and go.

Hosts are network namespaces here. The first one has the process that calls `run`, and
an agent of the tests or ssh starts ranks on the others.
"""

import json
import os
import subprocess
import sys

import network
import pytest

# A process that calls `run` with the arguments that it gets, and prints what comes of
# it. Step 8 waits until there are as many ranks as `members` says, one after another.
CALLS = """
import json, os, pathlib, signal, socket, sys
import keras_hvd
from keras_hvd.world import renewal

def count(deed="", of_rank=-1, members=(), filled=0):
    keras_hvd.init()
    number = renewal.of(os.environ).number
    state = keras_hvd.elastic.ObjectState(step=0)

    def do():
        if deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise LookupError("of one rank")

    def await_members(state, count):
        if keras_hvd.rank() == 0 and keras_hvd.size() != count:
            print(keras_hvd.size(), "wait to be", count, flush=True)
        while keras_hvd.size() != count:
            keras_hvd.allgather_object(None)
            state.check_host_updates()

    @keras_hvd.elastic.run
    def train(state):
        while state.step < 12:
            if state.step == 5 and number == of_rank:
                do()
            if 0 <= state.step - 8 < len(members):
                await_members(state, members[state.step - 8])
            keras_hvd.allgather_object(state.step)
            state.step += 1
            state.commit()

    train(state)
    place = number, keras_hvd.rank(), keras_hvd.size(), socket.gethostname()
    return [*place, bytes(filled)] if filled else place

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
    return len(secret), sys.argv[0].encode() in lines, secret in lines

name, given = sys.argv[1:]
try:
    said = keras_hvd.run(globals()[name], **json.loads(given))
    said = [[*one[:4], *map(len, one[4:])] for one in said]
except Exception as error:
    cause = error.__cause__
    said = [type(error).__name__, str(error), cause and [cause.rank, cause.host]]
print(json.dumps({"outcome": said}), flush=True)
"""


@pytest.fixture
def start(khvdrun, hosts, tmp_path):
    """Starts a call of `run` on the first host; H0, H1 and H2 are their addresses."""
    (tmp_path / "calls.py").write_text(CALLS)
    agent = network.agent(hosts, tmp_path / "agent")

    def start(name="count", variables=None, launch_agent=str(agent), **given):
        given = {"launch_agent": launch_agent, "start_timeout": 30, **given}
        text = json.dumps(given)
        for number, host in enumerate(hosts):
            text = text.replace(f"H{number}", host.address)
        command = [sys.executable, tmp_path / "calls.py", name, text]
        return subprocess.Popen(
            hosts[0].command(command),
            env={
                **os.environ,
                "KERAS_HVD_TEST_MARK": khvdrun.mark,
                **(variables or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def run(start):
    """The outcome of a call, and what khvdrun and the ranks said."""

    def run(*arguments, **given):
        with start(*arguments, **given) as process:
            return outcome(process)

    return run


def outcome(process):
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    print(out, err)
    assert process.returncode == 0
    (line,) = [each for each in out.splitlines() if each.startswith('{"outcome"')]
    return json.loads(line)["outcome"], err


def test_the_others_give_results(run):
    """Without rank 0, on whose host run was called."""
    given = {"kwargs": {"deed": "die", "of_rank": 0}, "np": 4, "min_np": 2}
    found, err = run(**given, hosts="H0:2,H1:1,H2:1")
    assert found == [[1, 0, 3, "host0"], [2, 1, 3, "host1"], [3, 2, 3, "host2"]]
    assert "was killed by signal 9 (SIGKILL); 3 ranks are left\n" in err


def test_large_results(run):
    given = {"kwargs": {"filled": 20_000_000}, "np": 2, "min_np": 2}
    found, _ = run(**given, hosts="H1:1,H2:1")
    assert [each[3:] for each in found] == [
        ["host1", 20_000_000],
        ["host2", 20_000_000],
    ]


def test_an_error_comes_with_its_rank_and_host(run):
    given = {"kwargs": {"deed": "raise", "of_rank": 2}, "np": 3, "min_np": 3}
    found, err = run(**given, hosts="H0:1,H1:1,H2:1")
    assert found == ["LookupError", "of one rank", [2, "host2"]]
    assert "[2] LookupError: of one rank\n" in err


def test_a_rank_that_is_started_again_on_its_host_gives_its_result(run):
    """Its number is not that of a process, so its first process' end does not count."""
    given = {"kwargs": {"deed": "raise", "of_rank": 1, "members": [3]}}
    given |= {"np": 3, "min_np": 2, "cooldown_range": [0, 0]}
    found, _ = run(**given, hosts="H0:1,H1:2")
    assert found == [[0, 0, 3, "host0"], [2, 1, 3, "host1"], [1, 2, 3, "host1"]]


def test_ssh_starts_the_ranks(run, by_ssh):
    given = {"np": 2, "min_np": 2, "hosts": "H1:1,H2:1", "launch_agent": None}
    found, _ = run(**given, variables=by_ssh)
    assert found == [[0, 0, 2, "host1"], [1, 1, 2, "host2"]]


def next_line(process, beginning):
    for line in process.stdout:
        if line.startswith(f"[0] {beginning}"):
            return
    pytest.fail(f"no line begins with {beginning!r}: {process.stderr.read()}")


def test_ranks_of_hosts_that_leave_give_no_results(start, hosts, tmp_path):
    """The last one's number is beyond the most ranks that there may be at a time."""
    listed = tmp_path / "listed"
    first, *others = (f"{host.address}:1" for host in hosts)

    def name(*lines):
        # At once.
        new = tmp_path / "new"
        new.write_text("\n".join(lines))
        new.rename(listed)

    name(first)
    given = {"np": 1, "min_np": 1, "max_np": 2, "kwargs": {"members": [2, 1, 2]}}
    with start(**given, host_discovery_script=f"cat {listed}") as process:
        next_line(process, "1 wait to be 2")
        name(first, others[0])
        next_line(process, "2 wait to be 1")
        name(first)
        next_line(process, "1 wait to be 2")
        name(first, others[1])
        found, err = outcome(process)
    assert found == [[0, 0, 2, "host0"], [2, 1, 2, "host2"]]
    assert "rank 1 leaves: 10.87.0.2 is not listed any more\n" in err
    assert "Traceback" not in err


def test_a_host_that_cannot_be_reached_is_an_error(run, by_ssh):
    given = {"np": 2, "min_np": 2, "hosts": "H0:1,10.87.0.99:1", "launch_agent": None}
    (kind, text, _), err = run(**given, variables=by_ssh)
    assert kind == "RankFailedError"
    assert "rank 1, without a word, ended before the function had returned" in text
    assert "connect to host 10.87.0.99" in err


def test_the_secret_is_on_no_command_line(run):
    found, _ = run("look_for_the_secret", np=2, min_np=2, hosts="H0:1,H1:1")
    assert found == [[64, True, False]] * 2
