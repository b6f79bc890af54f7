"""One khvdrun for each of several hosts, which are this one under different keys."""

import ast
import contextlib
import ctypes
import json
import os
import pathlib
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid

import network
import pytest
from free_port import free_port

SECRET = "0123456789abcdef of tests"
SHOW = (
    sys.executable,
    "-c",
    "import os\n"
    "print({n.removeprefix('KERAS_HVD_'): v for n, v in os.environ.items()\n"
    "       if n.startswith(('KERAS_HVD_', 'HOROVOD_'))})",
)
QUICKLY = ("--start-timeout", "5")


def end(*started) -> list[tuple[int, str, str]]:
    """The exit codes, outputs and errors of khvdruns."""
    outputs = [job.communicate(timeout=60) for job in started]
    return [(job.returncode, *output) for job, output in zip(started, outputs)]


def variables_in(output: str) -> list[dict]:
    """The variables that the ranks of a host have shown, in their order."""
    found = [ast.literal_eval(text) for text in re.findall("{.*?}", output)]
    return sorted(found, key=lambda one: int(one["RANK"]))


@pytest.mark.parametrize("counts", [[2, 2], [1, 3], [2, 1, 1]])
def test_all_ranks_know_their_place(start, rendezvous, counts):
    started = [
        start(
            *(number, len(counts), "-np", count, *SHOW),
            # As inside another job, whose variables mean nothing here.
            CROSS_RANK="0",
            CROSS_SIZE="1",
            RANK="7",
            REQUIRE_SIZE="8",
            JOB="another",
        )
        for number, count in reversed([*enumerate(counts)])
    ]
    ended = [*reversed(end(*started))]
    assert [(code, error) for code, _, error in ended] == [(0, "")] * len(counts)
    shown = [variables_in(output) for _, output, _ in ended]
    (job,) = {one.pop("JOB") for ranks in shown for one in ranks}
    assert job.startswith("khvdrun-")
    for ranks in shown:
        for one in ranks:
            del one["TEST_MARK"]
    assert shown == [
        [
            {
                "RANK": str(sum(counts[:number]) + here),
                "SIZE": str(sum(counts)),
                "LOCAL_RANK": str(here),
                "LOCAL_SIZE": str(count),
                "RENDEZVOUS": rendezvous,
                "HOST_KEY": f"host {number}",
                "SECRET": SECRET,
                "REQUIRE_SIZE": str(sum(counts)),
                "HOROVOD_RANK": str(sum(counts[:number]) + here),
                "HOROVOD_SIZE": str(sum(counts)),
                "HOROVOD_LOCAL_RANK": str(here),
                "HOROVOD_LOCAL_SIZE": str(count),
                "HOROVOD_CROSS_RANK": str(sum(n > here for n in counts[:number])),
                "HOROVOD_CROSS_SIZE": str(sum(n > here for n in counts)),
            }
            for here in range(count)
        ]
        for number, count in enumerate(counts)
    ]


def test_output_and_exit_code_name_the_job_s_ranks(start):
    program = "import os, sys; sys.exit(int(os.environ['KERAS_HVD_RANK']) * 3)"
    fail = (sys.executable, "-c", program)
    started = [start(number, 2, "-np", 1, *fail) for number in range(2)]
    (first, _, _), (second, _, error) = end(*started)
    assert (first, second) == (0, 3)
    assert re.search(r"khvdrun: rank 1 \(process \d+\) failed first: it ended", error)


def test_the_secret_is_in_no_command_line_and_no_output(start, khvdrun):
    wait = (sys.executable, "-c", "print('here'); input()")
    with start(0, 2, "-np", 1, "--verbose", *wait) as first:
        second = start(1, 2, "-np", 1, "--verbose", *wait)
        with second:
            for job in (first, second):
                assert job.stdout.readline().endswith("here\n")
            assert not any(SECRET in line for line in khvdrun.processes())
        (_, _, one), (_, _, other) = [
            (job.returncode, *job.communicate()) for job in (first, second)
        ]
    assert SECRET not in one + other


def test_a_job_on_one_host_gets_no_secret_and_meets_nobody(khvdrun):
    several = {"SECRET": SECRET, "RENDEZVOUS": "node0:29400", "SECRET_FILE": "/none"}
    environment = {f"KERAS_HVD_{name}": value for name, value in several.items()}
    ended = khvdrun.run("-np", 1, *SHOW, env=environment)
    (shown,) = variables_in(ended.stdout)
    assert not several.keys() & shown.keys()
    for name in (
        "RANK",
        "SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
    ):
        assert shown[name] == shown[f"HOROVOD_{name}"] == str(int("SIZE" in name))
    assert shown["REQUIRE_SIZE"] == "1"


def test_a_size_that_the_user_requires_is_checked_before_anything_starts(khvdrun):
    required = {"KERAS_HVD_REQUIRE_SIZE": "3"}
    ended = khvdrun.run("-np", 2, "echo", "started", env=required)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "KERAS_HVD_REQUIRE_SIZE=3, and this job would have 2 ranks" in ended.stderr


def test_a_file_has_the_secret_too(start, tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    started = [
        start(0, 2, "-np", 1, "true"),
        start(1, 2, "-np", 1, "true", SECRET="", SECRET_FILE=str(path)),
    ]
    assert [code for code, *_ in end(*started)] == [0, 0]


# --- failures ------------------------------------------------------------------------


def test_a_host_that_never_comes_is_named(start, rendezvous):
    before = time.monotonic()
    started = [start(number, 3, "-np", 1, *QUICKLY, *SHOW) for number in (0, 2)]
    ended = end(*started)
    assert time.monotonic() - before < 45  # The default is a minute.
    for code, output, error in ended:
        assert (code, output) == (os.EX_TEMPFAIL, "")
        assert re.match("khvdrun: error: node .* waited 5 s, and node 1 of 3", error)
        assert error.count("\n") == 1


# A khvdrun that ends as soon as it has come.
LEAVING = """
import os, sys
from keras_hvd.world.rendezvous import address, event_loop, gathering, proof, secret
group = gathering.Group(
    "node", proof.Purpose.NODES, 2, 3, [address.parse(sys.argv[1])],
    secret.read(os.environ).key(""), timeout=20,
)
loop = event_loop.EventLoop()
async def leave():
    client = gathering.RendezvousClient(loop, group, deadline=float("inf"))
    await client.connect()
    loop.start(client.tell({"ranks": 1, "nodes": 3}))
    await event_loop.pause(0)
loop.run(leave())
"""


def test_a_host_that_leaves_is_named(start, rendezvous):
    waiting = start(0, 3, "-np", 1, *SHOW)
    subprocess.run(
        [sys.executable, "-c", LEAVING, rendezvous],
        env={**os.environ, "KERAS_HVD_SECRET": SECRET},
        check=True,
    )
    ((code, _, error),) = end(waiting)
    assert code == os.EX_TEMPFAIL
    assert re.match(
        "khvdrun: error: node 2, on .* ended while the job was starting", error
    )


def test_a_wrong_secret_is_refused(start):
    # A refusal ends it at once.
    refused = start(1, 2, "-np", 1, *SHOW, SECRET="another secret of tests")
    waiting = start(0, 2, "-np", 1, *QUICKLY, *SHOW)
    (_, _, first), (_, _, second) = end(waiting, refused)
    assert "node 0, at " in first and "node 1 of 2 did not come" in first
    assert "refuses node 1: it has another secret" in second
    assert "another secret of tests" not in first + second
    assert SECRET not in first + second


def test_a_host_of_the_job_s_last_start_is_refused(start):
    """A pod of it may be there a while longer, with the same secret."""
    new = ("--job-id", "attempt 2", "-np", 1, *SHOW)
    old = ("--job-id", "attempt 1", "-np", 1, *SHOW)
    first = start(0, 2, *new)
    ((code, _, error),) = end(start(1, 2, *old))
    assert code != 0
    assert "refuses node 1: it has another secret, or another job's name" in error
    assert [code for code, *_ in end(first, start(1, 2, *new))] == [0, 0]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SECRET": ""}, "needs a secret, so that nobody else joins it: set KERAS_HVD"),
        ({"SECRET": "short"}, "KERAS_HVD_SECRET has 5 bytes, and needs 16 or more"),
        ({"SECRET": "", "SECRET_FILE": "/dev/null"}, "is not a regular file"),
        ({"INIT_TIMEOUT_SECONDS": "soon"}, "must be a number of seconds from 0, got"),
        ({"NETWORK_INTERFACES": "no0"}, "has no network interface 'no0'"),
        ({"NETWORK_INTERFACES": "a,,b"}, "must be names of network interfaces"),
        ({"TLS": "yes"}, "KERAS_HVD_TLS must be 0 or 1, got 'yes'"),
        (
            {"TLS": "1", "SSL_LIBRARY": "/none/libssl.so.3"},
            "KERAS_HVD_TLS=1 (khvdrun --tls) cannot be followed here: there is no "
            "/none/libssl.so.3. Install OpenSSL 1.1.1b or newer",
        ),
    ],
)
def test_what_is_missing_or_malformed_is_an_error_at_once(start, variables, expected):
    ((code, output, error),) = end(start(0, 2, "-np", 1, *SHOW, **variables))
    assert (code, output) == (2, "")
    assert error.startswith("khvdrun: error: ")
    assert expected in error


@pytest.mark.parametrize("encrypted", [0, 1])
def test_tls_on_one_host_only_is_an_error_on_both(start, encrypted):
    started = [
        start(number, 2, *["--tls"] * (number == encrypted), "-np", 1, *SHOW)
        for number in range(2)
    ]
    for code, output, error in end(*started):
        assert (code, output) == (os.EX_TEMPFAIL, "")
        assert re.match(
            rf"khvdrun: error: node {encrypted}.* was started with TLS, and node "
            rf"{1 - encrypted}.* without: give khvdrun --tls",
            error,
        )


# Two of three ranks wait for one that will not come.
FAILS_FIRST = """
import os, sys
import keras_hvd
if os.environ["KERAS_HVD_RANK"] == sys.argv[1]:
    raise ValueError("no data here")
keras_hvd.init()
"""


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_before_it_comes_ends_all_hosts(start, failing):
    """And their exit codes tell the host at fault."""
    since = time.monotonic()
    program = (sys.executable, "-c", FAILS_FIRST, failing)
    started = [
        start(number, 3, "-np", 1, "--term-after", 0, *program) for number in range(3)
    ]
    ended = end(*started)
    # The ranks' own limit is a minute.
    assert time.monotonic() - since < 50
    for number, (code, _, error) in enumerate(ended):
        assert code == (1 if number == failing else os.EX_TEMPFAIL)
        told = re.search(
            rf"khvdrun: rank {failing} on \S+ \(process \d+\) ended with exit code 1 "
            "before the ranks had met: ValueError: no data here",
            error,
        )
        assert bool(told) == (number != failing), error
        assert ("no rank of this host failed by itself" in error) == bool(told)
        assert ("failed first" in error) != bool(told)


def test_a_rank_that_cannot_listen_is_named_by_its_host_and_by_the_others(start):
    """Another try may succeed, but the rank has failed by itself."""
    program = (sys.executable, "-c", "import keras_hvd; keras_hvd.init()")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = [
            start(
                *(number, 2, "-np", 1, "--term-after", 0),
                *(["--ports", f"{port}-{port}"] if number == 1 else []),
                *program,
            )
            for number in range(2)
        ]
        (code, _, other), (own_code, _, own) = end(*started)
    assert (code, own_code) == (os.EX_TEMPFAIL, os.EX_TEMPFAIL)
    cause = (
        f"other programs, or ranks, have every port of KERAS_HVD_PORTS={port}-{port}"
    )
    assert re.search(rf"khvdrun: rank 1 .* before the ranks had met: .*{cause}", other)
    assert "rank 0" not in other
    assert cause in own
    assert re.search(r"rank 1 \(process \d+\) failed first: it ended", own)
    assert "the ranks have not met: the exit code is 75" in own


STOPS_ITS_KHVDRUN = """
import os, pathlib, signal, sys
import keras_hvd
made = pathlib.Path(sys.argv[1] + ".made")
made.write_text(f"{os.getpid()} {os.getppid()}")
made.rename(sys.argv[1])
os.kill(os.getppid(), signal.SIGSTOP)
raise ValueError("no data here")
"""


def test_the_words_of_a_rank_are_told_though_its_end_is_noticed_first(start, tmp_path):
    first = start(0, 2, "-np", 1, "--term-after", 0, sys.executable, "-c", WAITS)
    program = (sys.executable, "-c", STOPS_ITS_KHVDRUN, tmp_path / "processes")
    second = start(1, 2, "-np", 1, "--term-after", 0, *program)
    deadline = time.monotonic() + 50
    while not (tmp_path / "processes").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rank, launcher = map(int, (tmp_path / "processes").read_text().split())
    while pathlib.Path(f"/proc/{rank}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(launcher, signal.SIGCONT)
    (_, _, error), _ = end(first, second)
    assert "before the ranks had met: ValueError: no data here" in error


WAITS = """
import os, signal
if os.environ["KERAS_HVD_RANK"] == "1":
    print("here", flush=True)
    signal.pause()
import keras_hvd
keras_hvd.init()
"""


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        (True, r"rank 1 on \S+ \(process \d+\) was killed by signal 9 .* had met"),
        (False, r"the khvdrun of node 1 \(\S+\) ended before the ranks had met"),
    ],
)
def test_a_khvdrun_that_is_killed_before_the_ranks_meet_is_named(start, whole, said):
    wait = ("--term-after", 0, sys.executable, "-c", WAITS)
    first = start(0, 2, "-np", 1, *wait)
    second = start(1, 2, "-np", 1, *wait)
    assert second.stdout.readline() == "[1] here\n"
    # It consists of two processes, which end each other's work.
    [job] = (
        pathlib.Path(f"/proc/{second.pid}/task/{second.pid}/children")
        .read_text()
        .split()
    )
    os.kill(second.pid if whole else int(job), signal.SIGKILL)
    (code, _, error), _ = end(first, second)
    assert code == os.EX_TEMPFAIL
    assert re.search(said, error), error


def test_ranks_that_have_met_need_no_khvdrun_of_another_host(start):
    """A command that never joins may end on one host alone."""
    done = start(0, 2, "-np", 1, "true")
    program = "import signal; print('here', flush=True); signal.pause()"
    stays = start(1, 2, "-np", 1, sys.executable, "-c", program)
    ((code, _, error),) = end(done)
    assert (code, error) == (0, "")
    assert stays.stdout.readline() == "[1] here\n"
    assert stays.poll() is None
    stays.send_signal(signal.SIGTERM)
    ((code, _, _),) = end(stays)
    assert code == 128 + signal.SIGTERM


@pytest.mark.parametrize("known", ["", "203.0.113.7 train-0.train\n"])
def test_the_name_of_the_first_host_may_come_late(khvdrun, two_hosts, tmp_path, known):
    """Like a pod's name, which is unknown at first, or leads to the pod before it."""
    names = tmp_path / "hosts"
    names.write_text(known)
    for each in two_hosts:
        each.run("mount", "--bind", str(names), "/etc/hosts")
    place = ("--nnodes", 2, "--rendezvous", "train-0.train:29400", "-np", 1)
    environment = {"KERAS_HVD_SECRET": SECRET}
    joins = (sys.executable, "-c", "import keras_hvd; keras_hvd.init()")
    jobs = [
        khvdrun.start(
            *(*place, "--node-rank", number, *joins), on=host, env=environment
        )
        for number, host in enumerate(two_hosts)
    ]
    line = jobs[0].stderr.readline()
    assert "node 0 cannot listen at" in line and "It tries for 60 s" in line
    names.write_text(f"{two_hosts[0].address} train-0.train\n")
    assert [code for code, *_ in end(*jobs)] == [0, 0]


def test_a_long_wait_is_said_on_each_host(start, rendezvous):
    nobody = f"127.0.0.1:{free_port()}"
    waits = [
        start(0, 3, "-np", 1, *SHOW),
        start(2, 3, "-np", 1, "--rendezvous", nobody, *SHOW),
    ]
    assert waits[0].stderr.readline() == (
        "khvdrun: nodes 1 and 2 of 3 did not come so far. It waits for 60 s\n"
    )
    assert waits[1].stderr.readline() == (
        f"khvdrun: node 0 at {nobody} cannot be reached so far: Connection refused. It "
        "tries for 60 s\n"
    )
    for each in waits:
        each.send_signal(signal.SIGTERM)
    assert [code for code, *_ in end(*waits)] == [-signal.SIGTERM] * 2


def test_sigterm_ends_a_first_process_of_a_container_that_waits(khvdrun, rendezvous):
    container = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if subprocess.run([*container, "true"]).returncode != 0:
        pytest.skip("there can be no container")
    place = ("--nnodes", 2, "--node-rank", 0, "--rendezvous", rendezvous)
    command = (*place, "-np", 1, *SHOW)
    environment = {"KERAS_HVD_SECRET": SECRET}
    with khvdrun.start(*command, before=container, env=environment) as job:
        assert "node 1 of 2 did not come so far" in job.stderr.readline()
        children = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text()
        os.kill(int(children), signal.SIGTERM)
        assert end(job) == [(128 + signal.SIGTERM, "", "")]


def test_ctrl_c_ends_it_while_it_waits(start, rendezvous):
    host, port = rendezvous.split(":")
    with start(0, 2, "-np", 1, *SHOW) as job:
        while True:
            try:
                socket.create_connection((host, int(port))).close()
                break
            except ConnectionRefusedError:
                continue
        job.send_signal(signal.SIGINT)
        assert job.communicate(timeout=20) == ("", "")
    assert job.returncode == 128 + signal.SIGINT


# --- ranks started by other means ----------------------------------------------------

PLACES = """
import keras_hvd
keras_hvd.init()
print(keras_hvd.allgather_object(keras_hvd.rank()), keras_hvd.cross_size())
"""


def test_ranks_of_one_host_that_meet_are_a_job_like_others(rendezvous):
    variables = {"SIZE": 2, "LOCAL_SIZE": 2, "RENDEZVOUS": rendezvous, "SECRET": SECRET}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PLACES],
            env={
                **os.environ,
                **{
                    f"KERAS_HVD_{name}": str(value)
                    for name, value in {
                        **variables,
                        "RANK": rank,
                        "LOCAL_RANK": rank,
                    }.items()
                },
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [job.communicate(timeout=60)[0] for job in started] == ["[0, 1] 1\n"] * 2


SUM_OF_ALL = """
import ctypes
from allreduce_loop import SUM, reduce_in_place
import keras_hvd
keras_hvd.init()
values = (ctypes.c_int32 * 1)(10 ** keras_hvd.rank())
reduce_in_place("a", values, SUM)
print(values[0], keras_hvd.cross_rank(), keras_hvd.cross_size())
"""


def test_ranks_of_torchrun_meet_beside_its_store(khvdrun):
    # An address of this test's own, where no other process has the port after it.
    address = f"127.78.{os.getpid() // 250 % 250}.{os.getpid() % 250 + 1}"
    variables = {
        "TORCHELASTIC_RUN_ID": "none",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": address,
        "KERAS_HVD_SECRET": SECRET,
        "KERAS_HVD_INIT_TIMEOUT_SECONDS": "20",
        "KERAS_HVD_TEST_MARK": khvdrun.mark,
        "PYTHONPATH": os.pathsep.join([RANKS, *sys.path]),
    }
    places = [("one", 0, 2), ("one", 1, 2), ("other", 0, 1)]
    with socket.create_server((address, 0)) as store:
        variables["MASTER_PORT"] = str(store.getsockname()[1])
        started = [
            subprocess.Popen(
                [sys.executable, "-c", SUM_OF_ALL],
                env={
                    **os.environ,
                    **variables,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(local_size),
                    "KERAS_HVD_HOST_KEY": host,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, (host, local_rank, local_size) in enumerate(places)
        ]
        ended = end(*started)
        # The ranks speak another language.
        store.setblocking(False)
        with pytest.raises(BlockingIOError):
            store.accept()
    shown = [output for _, output, _ in ended]
    assert shown == ["111 0 2\n", "111 0 1\n", "111 1 2\n"], ended


# Launchers that do not tell how many of the ranks are on a host.
def by_flux(rank: int, local_rank: int, first: str) -> dict[str, str]:
    return {
        "FLUX_TASK_RANK": str(rank),
        "FLUX_JOB_SIZE": "3",
        "FLUX_TASK_LOCAL_ID": str(local_rank),
        "FLUX_JOB_NNODES": "2",
        "KERAS_HVD_RENDEZVOUS": f"{first}:29400",
    }


def by_pytorchs_variables(rank: int, local_rank: int, first: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "3",
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": first,
        "MASTER_PORT": "6105",
    }


@pytest.mark.parametrize("launched", [by_flux, by_pytorchs_variables])
def test_ranks_learn_how_many_are_on_their_host_as_they_meet(
    khvdrun, two_hosts, launched
):
    own = {
        **os.environ,
        "KERAS_HVD_SECRET": SECRET,
        "KERAS_HVD_SHARE_CORES": "1",
        "KERAS_HVD_TEST_MARK": khvdrun.mark,
        "PYTHONPATH": os.pathsep.join([RANKS, *sys.path]),
    }
    place = [sys.executable, os.path.join(RANKS, "place.py")]
    # They alternate between the hosts.
    started = [
        subprocess.Popen(
            two_hosts[rank % 2].command(place),
            env={**own, **launched(rank, rank // 2, two_hosts[0].address)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    ended = end(*started)
    assert [code for code, *_ in ended] == [0, 0, 0], ended
    shown = [json.loads(output) for _, output, _ in ended]
    assert [(one["rank"], one["size"]) for one in shown] == [(0, 3), (1, 3), (2, 3)]
    assert [one["local"] for one in shown] == [[0, 2], [0, 1], [1, 2]]
    assert [one["cross"] for one in shown] == [[0, 2], [1, 2], [0, 1]]
    assert [one["mpi4py"] for one in shown] == [False] * 3


def test_ranks_without_a_secret_are_told_how_to_have_one(khvdrun):
    variables = by_pytorchs_variables(0, 0, "127.0.0.1")
    joins = (sys.executable, "-c", "import keras_hvd; keras_hvd.init()")
    ended = subprocess.run(
        joins, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "KERAS_HVD_SECRET_FILE" in ended.stderr


# --- networks ------------------------------------------------------------------------

# Before a rank tells of itself, all its sockets listen.
WHERE = """
import os
import network
from allreduce_loop import allreduce
import keras_hvd
from keras_hvd.world.rendezvous import rank_table
def show(state):
    line = " ".join([state, *sorted(network.addresses_in_use(state))])
    os.write(1, line.encode() + b"\\n")
identity = rank_table.identity
rank_table.identity = lambda key: show("listening") or identity(key)
keras_hvd.init()
allreduce("all are connected", 1)
show("connected")
allreduce("all have looked", 1)
"""


@pytest.fixture(scope="module")
def hosts_with_two_networks(tmp_path_factory):
    """Two hosts and, by network, their addresses; "both" names the first on both."""
    if why := network.unavailable():
        pytest.skip(f"there can be no hosts: {why}")
    names = tmp_path_factory.mktemp("names") / "hosts"
    with network.connected(2) as hosts:
        networks = {
            "cable": [host.address for host in hosts],
            "direct": network.join(*hosts),
        }
        lines = [f"{address} both\n" for address, _ in networks.values()]
        names.write_text("".join(lines))
        for host in hosts:
            host.run("mount", "--bind", str(names), "/etc/hosts")
        yield hosts, networks


@pytest.mark.parametrize(
    ("chosen", "options", "variables"),
    [
        ("direct", ("--network-interfaces", "direct"), {}),
        ("cable", (), {"HOROVOD_GLOO_IFACE": "cable"}),
    ],
    ids=["option", "variable"],
)
def test_of_two_networks_only_the_chosen_one_is_used(
    khvdrun, hosts_with_two_networks, chosen, options, variables
):
    hosts, networks = hosts_with_two_networks
    command = ("-np", 2, "--no-prefix", sys.executable, "-c", WHERE)

    def start(number):
        place = ("--nnodes", 2, "--node-rank", number, "--rendezvous", "both:29400")
        environment = {
            **variables,
            "KERAS_HVD_SECRET": SECRET,
            "KERAS_HVD_HOST_KEY": f"host {number}",
            "PYTHONPATH": os.pathsep.join([RANKS, *sys.path]),
        }
        on = hosts[number]
        return khvdrun.start(*place, *options, *command, on=on, env=environment)

    with start(0) as first:
        while not (waiting := network.addresses_in_use("listening", hosts[0].pid)):
            assert first.poll() is None, first.communicate()
            time.sleep(0.05)  # between two looks
        ended = end(first, start(1))
    assert waiting == {networks[chosen][0]}
    for (code, output, error), own in zip(ended, networks[chosen], strict=True):
        assert code == 0, error
        assert set(output.splitlines()) == {
            f"listening {own}",
            f"connected {' '.join(networks[chosen])}",
        }


# --- TLS -----------------------------------------------------------------------------

# A tensor and an object, which no other job on this machine has. TensorFlow takes long
# to import.
TELL = """
import ctypes, os
from allreduce_loop import MAX, reduce_in_place
import keras_hvd
keras_hvd.init()
known = os.environ["TENSOR"].encode() * 5000
values = (ctypes.c_int32 * (len(known) // 4)).from_buffer_copy(known)
reduce_in_place("tensor", values, MAX)
assert bytes(values) == known
told = os.environ["OBJECT"]
assert keras_hvd.allgather_object(told) == [told] * keras_hvd.size()
"""


class Recorder:
    """Records the packets of the loopback interface to and from one IPv4 address."""

    def __init__(self, address: str):
        self.recorded = b""
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)
        number = int.from_bytes(socket.inet_aton(address), "big")
        # Packets begin with IP's header, with the source at 12 and the destination at
        # 16: load, compare, load, compare, take all, take nothing.
        program = b"".join(
            struct.pack("HBBI", *each)
            for each in (
                *((0x20, 0, 0, 12), (0x15, 2, 0, number)),
                *((0x20, 0, 0, 16), (0x15, 0, 1, number)),
                *((0x06, 0, 0, 1 << 18), (0x06, 0, 0, 0)),
            )
        )
        kept = ctypes.create_string_buffer(program)
        attached = struct.pack("HP", len(program) // 8, ctypes.addressof(kept))
        self._socket.setsockopt(socket.SOL_SOCKET, 26, attached)  # SO_ATTACH_FILTER
        self._socket.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
        self._socket.bind(("lo", 0x0800))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_) -> None:
        """All packets have come by now, since they are recorded as they are sent."""
        with self._socket:
            self._socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.recorded += self._socket.recv(1 << 18)


@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "tls"])
def test_with_tls_nothing_can_be_read_on_the_way(khvdrun, encrypted):
    address = f"127.77.{os.getpid() // 250 % 250}.{os.getpid() % 250 + 1}"
    with socket.create_server((address, 0)) as found:
        rendezvous = f"{address}:{found.getsockname()[1]}"
    secrets = {name: uuid.uuid4().hex for name in ("TENSOR", "OBJECT", "HOST_KEY")}
    try:
        recorder = Recorder(address)
    except PermissionError:
        pytest.skip("only root may record packets")
    with recorder:
        started = [
            khvdrun.start(
                *("--nnodes", 2, "--node-rank", number, "--rendezvous", rendezvous),
                *["--tls"] * encrypted,
                *("-np", 2 - number, sys.executable, "-c", TELL),
                env={
                    **secrets,
                    "KERAS_HVD_HOST_KEY": f"{number} {secrets['HOST_KEY']}",
                    "KERAS_HVD_SECRET": SECRET,
                    "PYTHONPATH": os.pathsep.join([RANKS, *sys.path]),
                },
            )
            for number in range(2)
        ]
        codes = [code for code, *_ in end(*started)]
    assert codes == [0, 0]
    # The hellos of a khvdrun, of two ranks, and of the two links with rank 0.
    assert recorder.recorded.count(b"KHVDMEE") >= 10
    for text in secrets.values():
        assert (text.encode() in recorder.recorded) == (not encrypted)


# --- ranks that die ------------------------------------------------------------------

CORE_PATTERN = pathlib.Path("/proc/sys/kernel/core_pattern").read_text()
# Whether a core comes to be where the process is: not if a program gets it.
LEAVES_CORES = CORE_PATTERN.startswith("core") and (
    resource.getrlimit(resource.RLIMIT_CORE)[1] == resource.RLIM_INFINITY
)

# TensorFlow takes long to import.
REDUCE_FOR_EVER = """
import ctypes, mmap, os, resource, signal, sys, time
from allreduce_loop import allreduce
import keras_hvd
keras_hvd.init()
deeds = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: (write_pid(), dump_for_long()),
    "exit": lambda: os._exit(3),
    "stop rank 2": lambda: (signal_rank_2(signal.SIGSTOP), deeds["kill"]()),
}
def signal_rank_2(number):
    with open(sys.argv[3]) as file:
        os.kill(int(file.read()), number)
def write_pid():
    with open(sys.argv[3], "w") as file:
        file.write(str(os.getpid()))
def dump_for_long():
    # The kernel looks at each page, and leaves a hole in the file for what was never
    # used: 200 GiB take six seconds, and neither memory nor disk.
    os.chdir(os.path.dirname(sys.argv[3]))
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    MAP_NORESERVE = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, int(sys.argv[4]) << 30, flags)
    memory[0] = 1
    ctypes.string_at(0)
if sys.argv[2] == "stop rank 2" and keras_hvd.rank() == 2:
    write_pid()
try:
    allreduce("first", 1)
    allreduce("second", 1)
    if keras_hvd.rank() == int(sys.argv[1]):
        print("dies", os.getpid(), time.monotonic(), flush=True)
        deeds[sys.argv[2]]()
    while True:
        allreduce("again", 100_000)
except keras_hvd.KerasHvdError as error:
    # In one piece: others' lines may end one within which it pauses.
    os.write(1, f"raises {time.monotonic()} {error}\\n".encode())
    if sys.argv[2] == "stop rank 2" and keras_hvd.rank() == 3:
        signal_rank_2(signal.SIGCONT)
"""
RANKS = str(pathlib.Path(__file__).parent / "ranks")
REPORT = "What each rank did last"


@pytest.fixture
def reduce_for_ever(start, monkeypatch, tmp_path):
    """Runs ranks on each of several hosts to their errors; returns all they wrote."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([RANKS, *sys.path]))

    def reduce(victim, deed="kill", counts=(2, 2), **variables):
        output = once(victim, deed, counts, **variables)
        # The engine passes over a host that has no core for 0.7 s, and is right.
        if len(counts) == 2 and re.search("did not answer|without a word", output):
            output = once(victim, deed, counts, **variables)
        return output

    def once(victim, deed, counts, **variables_of_the_last):
        command = (
            sys.executable,
            "-c",
            REDUCE_FOR_EVER,
            victim,
            deed,
            tmp_path / "pid",
            # A program that gets the core reads all of it.
            200 if LEAVES_CORES else 1,
        )
        variables = [{} for _ in counts]
        variables[-1] = variables_of_the_last
        started = [
            start(number, len(counts), "-np", count, *command, **variables[number])
            for number, count in enumerate(counts)
        ]
        ended = []
        if deed == "crash":
            own = next(n for n in range(len(counts)) if victim < sum(counts[: n + 1]))
            # The other hosts do not wait for the core. The rest of it is not needed.
            ended = end(*(job for job in started if job is not started[own]))
            started = [started[own]]
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        ended += end(*started)
        assert deed != "crash" or not LEAVES_CORES or [*tmp_path.glob("core*")]
        output = "".join(output + error for _, output, error in ended)
        # khvdrun says in front of each line which rank has written it.
        return re.sub(r"^\[\d+\] ", "", output, flags=re.MULTILINE)

    return reduce


def same_error(output: str, survivors: int) -> str:
    """The error of all survivors, in time, the same but for their own ranks."""
    died = float(re.search(r"dies \d+ (\S+)", output)[1])
    raised = re.findall(
        r"raises (\S+) allreduce '.*?' failed on rank \d+: (.*)", output
    )
    assert len(raised) == survivors, output
    delays = [float(when) - died for when, _ in raised]
    # One may wait for a core.
    assert min(delays) < 2 and max(delays) < 4
    (error,) = {error for _, error in raised}
    return error


HOW_IT_ENDS = {
    "kill": "was killed by SIGKILL",
    "crash": "crashed with SIGSEGV",
    "exit": "exited with code 3 without leaving the job",
}


# Rank 0, its neighbour on the host, another host's leader, and that one's neighbour.
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("deed", HOW_IT_ENDS)
def test_all_hosts_say_the_same_of_a_rank_that_dies(reduce_for_ever, victim, deed):
    output = reduce_for_ever(victim, deed, (2, 2, 2))
    pid = re.search(r"dies (\d+) ", output)[1]
    error = same_error(output, survivors=5)
    who = f"rank {victim} (pid {pid} on {socket.gethostname()}) "
    assert error.startswith(who + HOW_IT_ENDS[deed])
    # One report, with the last actions of the ranks of all hosts.
    assert output.count(REPORT) == 1, output
    report = output.partition(REPORT)[2]
    did = dict(re.findall(r"\n  rank (\d+) \(pid \d+ on \S+\): (.*)", report))
    assert [*map(int, did)] == [*range(6)]
    assert did[str(victim)].startswith("allreduce 'second' done"), output
    assert all(text.startswith("allreduce '") for text in did.values()), output


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("deed", ["kill", "crash"])
def test_a_rank_that_dies_alone_on_its_host_is_named_too(reduce_for_ever, victim, deed):
    output = reduce_for_ever(victim, deed, (1, 1, 1))
    pid = re.search(r"dies (\d+) ", output)[1]
    who = f"rank {victim} (pid {pid} on {socket.gethostname()})"
    error = same_error(output, survivors=2)
    assert error.startswith(f"{who} has gone without a word: its connections")
    assert output.count(REPORT) == 1, output
    assert f"\n  {who}: its host did not answer" in output
    did = re.findall(r"\n  rank (\d+) \(pid \d+ on \S+\): allreduce '", output)
    assert [*map(int, did)] == [rank for rank in range(3) if rank != victim]


# The leader of the second host cannot pass anything on.
def test_a_host_whose_leader_is_stopped_hears_of_a_death_too(reduce_for_ever):
    output = reduce_for_ever(1, "stop rank 2", (2, 2))
    assert "was killed by SIGKILL" in same_error(output, survivors=3)
    assert output.count(REPORT) == 1, output
    assert len(re.findall(r"\n  rank \d \(pid \d+ on \S+\): allreduce '", output)) == 4


# Prints the bytes that each connection of this process has sent, by the kernel's count.
SENT = """
import ctypes, os, socket, struct
import numpy as np
from allreduce_loop import SUM, allreduce, reduce_in_place
import keras_hvd
keras_hvd.init()
given = np.arange(1 << 22, dtype=np.int32)
values = (ctypes.c_int32 * (1 << 22)).from_buffer_copy(given)
reduce_in_place("a", values, SUM)
assert (np.frombuffer(values, np.int32) == 2 * given).all()
# Then the other rank has all of it.
allreduce("both have it", 1)
TCP_BYTES_SENT = 200
sent = []
for file in os.listdir("/proc/self/fd"):
    if not os.path.exists(f"/proc/self/fd/{file}"):
        continue
    if not os.readlink(f"/proc/self/fd/{file}").startswith("socket:"):
        continue
    with socket.socket(fileno=os.dup(int(file))) as found:
        if found.family == socket.AF_INET:
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            all_sent, sent_again = struct.unpack_from("QQ", info, TCP_BYTES_SENT)
            sent.append(all_sent - sent_again)
print("sent", *sorted(sent))
"""


def test_several_connections_carry_a_tensor_in_turns(start, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([RANKS, *sys.path]))
    started = [
        start(number, 2, "-np", 1, sys.executable, "-c", SENT, DATA_CONNECTIONS=count)
        for number, count in enumerate("31")
    ]
    for code, output, error in end(*started):
        assert code == 0, error
        sent = [*map(int, output.split()[2:])]
        assert len(sent) == 4
        assert sent[0] < 100_000
        # A part of a tensor of 16 MiB, or all of it.
        assert sum(sent[1:]) > 15 << 20
        assert sent[3] - sent[1] <= 64 << 10


def test_hosts_with_other_sizes_of_exchange_memory_are_told(reduce_for_ever):
    output = reduce_for_ever(-1, EXCHANGE_BYTES="65536")
    assert output.count(REPORT) == 1, output
    errors = re.findall(r"raises \S+ (.*)", output)
    assert len(errors) == 4
    for error in errors:
        assert "KERAS_HVD_EXCHANGE_BYTES must be the same on all hosts" in error
        assert "4194304" in error and "65536" in error


# As on two copies of one virtual machine.
ALIKE = """
import ctypes
import numpy as np
from allreduce_loop import SUM, reduce_in_place
import keras_hvd
from keras_hvd.world.rendezvous import rank_table
identity = rank_table.identity
rank_table.identity = lambda key: identity(key) | {"host_key": "one", "kernel": "one"}
keras_hvd.init()
given = np.arange(1 << 20, dtype=np.int32) * (keras_hvd.rank() + 1)
values = (ctypes.c_int32 * (1 << 20)).from_buffer_copy(given)
reduce_in_place("a", values, SUM)
assert (np.frombuffer(values, np.int32) == np.arange(1 << 20) * 6).all()
print("cross", keras_hvd.rank(), keras_hvd.cross_rank(), keras_hvd.cross_size())
"""


@pytest.mark.skipif(bool(network.unavailable()), reason=network.unavailable())
def test_machines_that_seem_to_be_one_are_two_hosts():
    environment = {
        **os.environ,
        "KERAS_HVD_SECRET": SECRET,
        "KERAS_HVD_RENDEZVOUS": "10.87.0.1:29400",
        "PYTHONPATH": os.pathsep.join([RANKS, *sys.path]),
        "KERAS_HVD_SIZE": "3",
    }
    with network.connected(2) as hosts, contextlib.ExitStack() as running:
        started = []
        for rank, (host, local_rank, local_size) in enumerate(
            [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
        ):
            process = subprocess.Popen(
                hosts[host].command([sys.executable, "-c", ALIKE]),
                env={
                    **environment,
                    "KERAS_HVD_RANK": str(rank),
                    "KERAS_HVD_LOCAL_RANK": str(local_rank),
                    "KERAS_HVD_LOCAL_SIZE": str(local_size),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            running.enter_context(process)
            running.callback(process.kill)
            started.append(process)
        ended = end(*started)
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert [output for _, output, _ in ended] == [
        "cross 0 0 2\n",
        "cross 1 0 1\n",
        "cross 2 1 2\n",
    ]
    (warning,) = re.findall("cannot share memory.*", ended[0][2])
    assert re.search(
        r"instead: rank 2 \(process \d+ on host1\) got no memory of rank 0 "
        r"\(process \d+ on host0\): Connection refused",
        warning,
    )


# --- ranks that are stopped ----------------------------------------------------------

STOP = """
import os, signal, sys
from allreduce_loop import allreduce
import keras_hvd
keras_hvd.init()
allreduce("first", 1)
if keras_hvd.rank() == int(sys.argv[1]):
    print("stops", os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
allreduce("second", 1)
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("victim", "counts", "reporter", "expected"),
    [
        (0, (1, 1), 1, "has not answered for"),
        (2, (2, 2), 0, "does not answer, which speaks for its host"),
        # Its leader answers for it.
        (
            3,
            (2, 2),
            0,
            "has not; its last was allreduce 'first'; its process is stopped",
        ),
    ],
)
def test_a_rank_that_is_stopped_is_named(
    start, monkeypatch, victim, counts, reporter, expected
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([RANKS, *sys.path]))
    limits = {"STALL_WARNING_SECONDS": "6", "STALL_ABORT_SECONDS": "30"}
    command = (sys.executable, "-c", STOP, victim)
    jobs = [
        start(number, len(counts), "-np", count, *command, **limits)
        for number, count in enumerate(counts)
    ]
    stopped = jobs[1 if victim else 0]
    pid = int(re.search(r"stops (\d+)", stopped.stdout.readline())[1])
    errors = ""
    for named in iter(jobs[reporter].stderr.readline, ""):
        if expected in named:
            break
        errors += named
    os.kill(pid, signal.SIGCONT)
    who = f"rank {victim} (pid {pid} on {socket.gethostname()})"
    assert f"{who} {expected}" in named, errors
    for code, _, error in end(*jobs):
        assert code == 0
        errors += error
    # Once, and no rank blames the others of its host.
    assert expected not in errors
    assert f"rank {victim ^ 1} (pid" not in errors


def test_a_stall_that_ends_the_job_without_a_warning_names_who_is_stopped(
    start, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([RANKS, *sys.path]))
    limits = {"STALL_WARNING_SECONDS": "-1", "STALL_ABORT_SECONDS": "4"}
    command = (sys.executable, "-c", STOP, 3)
    jobs = [start(n, 2, "-np", 2, *command, **limits) for n in range(2)]
    pid = int(re.search(r"stops (\d+)", jobs[1].stdout.readline())[1])
    ((code, _, error),) = end(jobs[0])
    # Its khvdrun may have ended it by now.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    end(jobs[1])
    assert code == os.EX_TEMPFAIL
    assert re.search(rf"rank 3 \(pid {pid} on .*; its process is stopped", error), error


def test_a_stopped_rank_0_is_passed_over_in_the_one_report(start, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([RANKS, *sys.path]))
    limits = {"STALL_WARNING_SECONDS": "-1", "STALL_ABORT_SECONDS": "4"}
    command = (sys.executable, "-c", STOP, 0)
    jobs = [start(n, 3, "-np", 1, *command, **limits) for n in range(3)]
    pid = int(re.search(r"stops (\d+)", jobs[0].stdout.readline())[1])
    others = end(*jobs[1:])
    os.kill(pid, signal.SIGCONT)
    ended = [*end(jobs[0]), *others]
    # The exit of the stopped rank's host is not another host's fault.
    assert [code for code, *_ in ended] == [1, os.EX_TEMPFAIL, os.EX_TEMPFAIL]
    for _, _, error in ended:
        assert f"rank 0 (pid {pid} on" in error
        assert "ended by KERAS_HVD_STALL_ABORT_SECONDS" in error
    # khvdrun shows its end once more.
    reports = re.findall(
        r"(?<=\] )What each rank did last:(?:\n\[\d\] .*)+",
        "".join(error for _, _, error in ended),
    )
    (report,) = reports
    assert re.search(rf"rank 0 \(pid {pid} on .*did not answer", report)
    for rank in (1, 2):
        assert re.search(rf"rank {rank} \(pid \d+ on .*second", report)


NO_MEMORY = """
import resource
from allreduce_loop import allreduce
import keras_hvd
import os
if os.environ["KERAS_HVD_RANK"] == "2":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
keras_hvd.init()
allreduce("first", 1)
"""


@pytest.mark.parametrize("options", [(), ("--tls",)])
def test_a_host_that_cannot_start_says_why_on_the_others(start, monkeypatch, options):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([RANKS, *sys.path]))
    command = (*options, "-np", 2, sys.executable, "-c", NO_MEMORY)
    since = time.monotonic()
    ended = end(*(start(number, 2, *command) for number in range(2)))
    assert time.monotonic() - since < 50
    assert [code for code, *_ in ended] == [os.EX_TEMPFAIL, 1]
    for _, _, error in ended:
        assert "MiB of shared memory: fallocate: File too large" in error
    (_, _, error), _ = ended
    assert re.search(r"rank [23] could not start: .*shared memory", error), error


WRONG_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static const long kBehind = 3 * 3600;

int clock_gettime(clockid_t clock, struct timespec* to) {
  int (*next)(clockid_t, struct timespec*) = dlsym(RTLD_NEXT, "clock_gettime");
  const int failed = next(clock, to);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) to->tv_sec -= kBehind;
  return failed;
}
int gettimeofday(struct timeval* to, void* zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  to->tv_sec = now.tv_sec;
  to->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t* to) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (to != 0) *to = now.tv_sec;
  return now.tv_sec;
}
"""
DIES_AT_LAST = """
import os, signal, sys, time
from allreduce_loop import allreduce
import keras_hvd
keras_hvd.init()
print("clocks", time.time(), time.monotonic(), flush=True)
for step in range(50):
    allreduce(f"step {step}", 1000)
if keras_hvd.rank() == 3:
    os.kill(os.getpid(), signal.SIGKILL)
allreduce("after", 1)
"""
CLONE_NEWTIME = 0x80


def enter_another_day() -> None:
    """The next program's monotonic clock is a day ahead, as another host's may be."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWTIME) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWTIME)")
    pathlib.Path("/proc/self/timens_offsets").write_text(
        "monotonic 86400 0\nboottime 86400 0\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has another monotonic clock")
@pytest.mark.skipif(
    not os.path.exists("/proc/self/timens_offsets"), reason="no time namespaces"
)
def test_hosts_need_not_agree_on_the_time(start, khvdrun, monkeypatch, tmp_path):
    """Host 1's clocks are 3 hours behind, and a day ahead."""
    library = tmp_path / "wrong_clock.so"
    compiler = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=WRONG_CLOCK, text=True, check=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([RANKS, *sys.path]))
    command = (*("--tls", "-np", 2, sys.executable, "-c"), DIES_AT_LAST)
    jobs = [start(0, 2, *command)]
    monkeypatch.setenv("LD_PRELOAD", str(library))
    ordinary = khvdrun.start
    monkeypatch.setattr(
        khvdrun,
        "start",
        lambda *rest, **popen: ordinary(*rest, **popen, preexec_fn=enter_another_day),
    )
    jobs.append(start(1, 2, *command))
    since = time.monotonic()
    ended = end(*jobs)
    assert time.monotonic() - since < 50
    times = [
        [float(number) for number in re.search(r"clocks (\S+) (\S+)", output).groups()]
        for _, output, _ in ended
    ]
    (day, uptime), (wrong_day, wrong_uptime) = times
    assert day - wrong_day == pytest.approx(3 * 3600, abs=30)
    assert wrong_uptime - uptime == pytest.approx(86400, abs=30)
    (_, _, error), (_, _, other_error) = ended
    assert "rank 3 (pid" in error
    reports = "".join(
        re.findall(
            r"(?<=\] )What each rank did last:(?:\n\[\d\] .*)+", error + other_error
        )
    )
    ages = [float(age) for age in re.findall(r"\(([\d.]+) s ago\)", reports)]
    assert len(ages) >= 4
    assert max(ages) < 20, reports


NCCL_NETWORK = """
import os
import keras_hvd
keras_hvd.init()
print("NCCL uses", os.environ.get("NCCL_SOCKET_IFNAME"), flush=True)
"""


def test_nccl_gets_the_network_unless_it_has_one(start, khvdrun, monkeypatch):
    command = ("-np", 1, sys.executable, "-c", NCCL_NETWORK)
    jobs = [start(0, 2, *command)]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    jobs.append(start(1, 2, *command))
    (_, own, _), (_, given, _) = end(*jobs)
    assert "NCCL uses =lo" in own
    assert "NCCL uses eth7" in given
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    alone = khvdrun.run(*command)
    assert "NCCL uses None" in alone.stdout
