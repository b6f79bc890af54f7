"""srun starts the ranks on several nodes of a real Slurm, with a real MUNGE."""

import contextlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import slurm
from elastic_jobs import COUNTS, SCRIPT

RANKS = Path(__file__).parent / "ranks"
PLACE = (sys.executable, RANKS / "place.py")
QUIETLY = {"TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[slurm.Cluster]:
    if why := slurm.unavailable():
        pytest.skip(f"there can be no Slurm: {why}")
    with slurm.cluster(2, tmp_path_factory.mktemp("slurm")) as made:
        yield made


def places(printed: str) -> list[tuple]:
    """Where the ranks are, in their order: local and cross ranks, and the host."""
    found = [json.loads(one) for one in re.findall(r"{.*?}", printed)]
    found.sort(key=lambda place: place["rank"])
    assert [one["rank"] for one in found] == [*range(found[0]["size"])]
    assert not any(one["mpi4py"] for one in found)
    return [(*one["local"], *one["cross"], one["host"]) for one in found]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            ["-N", "2", "-n", "4", "--ntasks-per-node", "2"],
            [(0, 2, 0, 2, "host0"), (1, 2, 0, 2, "host0")]
            + [(0, 2, 1, 2, "host1"), (1, 2, 1, 2, "host1")],
            id="even",
        ),
        pytest.param(
            ["-N", "2", "-n", "3"],
            [(0, 2, 0, 2, "host0"), (1, 2, 0, 1, "host0"), (0, 1, 1, 2, "host1")],
            id="uneven",
        ),
        pytest.param(
            ["-N", "2", "-n", "3", "-m", "cyclic"],
            [(0, 2, 0, 2, "host0"), (0, 1, 1, 2, "host1"), (1, 2, 0, 1, "host0")],
            id="cyclic",
        ),
        pytest.param(
            ["-w", "host0", "-N", "1", "-n", "2"],
            [(0, 2, 0, 1, "host0"), (1, 2, 0, 1, "host0")],
            id="one-node",
        ),
        pytest.param(
            ["-N", "1", "-n", "1", ":", "-N", "1", "-n", "2"],
            [(0, 1, 0, 2, "host0"), (0, 2, 1, 2, "host1"), (1, 2, 0, 1, "host1")],
            id="heterogeneous",
        ),
    ],
)
def test_ranks_know_their_place_and_meet(cluster, options, expected):
    ended = cluster.run("srun", *options, *PLACE)
    assert ended.returncode == 0, ended.stderr
    assert places(ended.stdout) == expected


def test_the_commands_of_the_documentation(cluster, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "slurm.md"
    commands = re.findall(r"^    (.*\bsrun .*)", page.read_text(), re.MULTILINE)
    assert len(commands) == 2
    (tmp_path / "train.py").symlink_to(RANKS / "place.py")
    here = f"cd {tmp_path} && PATH={Path(sys.executable).parent}:$PATH"
    on_host = [[(n, 4, host, 2, f"host{host}") for n in range(4)] for host in (0, 1)]
    for command in commands:
        ended = cluster.run("sh", "-c", f"{here} && {command}")
        assert ended.returncode == 0, ended.stderr
        assert places(ended.stdout) == [*on_host[0], *on_host[1]]


def test_the_batch_file_of_the_documentation(cluster, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
    (batch,) = re.findall(r'^```sh title="train.sbatch"\n(.*?)^```', page, re.M | re.S)
    here = f"PATH={Path(sys.executable).parent}:$PATH"
    assert "source ~/keras/bin/activate" in batch
    script = tmp_path / "train.sbatch"
    script.write_text(batch.replace("source ~/keras/bin/activate", here))
    (tmp_path / "train.py").symlink_to(RANKS / "place.py")
    ended = cluster.run("sbatch", "--wait", "--chdir", tmp_path, script)
    (log,) = tmp_path.glob("train-*.log")
    assert ended.returncode == 0, log.read_text()
    on_host = [[(n, 4, host, 2, f"host{host}") for n in range(4)] for host in (0, 1)]
    assert places(log.read_text()) == [*on_host[0], *on_host[1]]


def test_rank_0_on_another_node_than_the_first_is_an_error(cluster, tmp_path):
    (tmp_path / "hosts").write_text("host1\nhost0\n")
    # The other rank is ended two seconds later: at once its output may be lost.
    ended = cluster.run(
        *("srun", "-N", "2", "-n", "2", "-m", "arbitrary", "--wait", "2", *PLACE),
        SLURM_HOSTFILE=str(tmp_path / "hosts"),
    )
    assert ended.returncode != 0
    assert "SLURM_PROCID=0 and SLURM_NODEID=1 contradict each other" in ended.stderr
    assert "Set KERAS_HVD_RENDEZVOUS to HOST:PORT of rank 0's node" in ended.stderr


def test_tls_encrypts_here_too(cluster):
    ended = cluster.run("srun", "-N", "2", "-n", "2", *PLACE, KERAS_HVD_TLS="1")
    assert ended.returncode == 0, ended.stderr
    assert places(ended.stdout) == [(0, 1, 0, 2, "host0"), (0, 1, 1, 2, "host1")]


def test_khvdrun_hands_over_to_srun_within_an_allocation(cluster):
    khvdrun = (sys.executable, "-m", "keras_hvd.launch")
    ended = cluster.run(
        *("salloc", "--quiet", "-N", "2", "-n", "4"),
        *(*khvdrun, "-np", "4", "-H", "host0:2,host1:2", *PLACE),
    )
    assert ended.returncode == 0, ended.stderr
    assert places(ended.stdout) == [
        *((0, 2, 0, 2, "host0"), (1, 2, 0, 2, "host0")),
        *((0, 2, 1, 2, "host1"), (1, 2, 1, 2, "host1")),
    ]


CALL = """
import os, socket
import keras_hvd

def place(greeting):
    keras_hvd.init()
    told = [name for name in os.environ if name.startswith("KERAS_HVD_CALLER")]
    return greeting, keras_hvd.rank(), keras_hvd.size(), socket.gethostname(), told

print(keras_hvd.run(place, ("it",), np=3, hosts="host0:2,host1:1"))
"""


def test_run_hands_over_to_srun_within_an_allocation(cluster, tmp_path):
    script = tmp_path / "call.py"
    script.write_text(CALL)
    words = ("salloc", "--quiet", "-N", "2", "-n", "4", sys.executable, script)
    ended = cluster.run(*words, **QUIETLY)
    assert ended.returncode == 0, ended.stderr
    hosts = ["host0", "host0", "host1"]
    expected = [("it", rank, 3, host, []) for rank, host in enumerate(hosts)]
    assert ended.stdout == f"{expected}\n"


@pytest.mark.timeout(600)
def test_mnist_comes_to_the_same_weights_as_on_one_host(
    cluster, mnist_on_one_host, train_mnist
):
    on_two = train_mnist(
        lambda words: cluster.command("srun", "-N", "2", "-n", "3", *words),
        cluster.environment(),
    )
    for weight, other in zip(mnist_on_one_host, on_two, strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=1e-9)


def test_two_steps_of_a_job_run_at_once(cluster, tmp_path):
    step = f"srun --overlap -N 2 -n 2 {PLACE[0]} {PLACE[1]}"
    both = f"{step} > {tmp_path}/0 & first=$!; {step} > {tmp_path}/1 && wait $first"
    ended = cluster.run("salloc", "--quiet", "-N", "2", "-n", "4", "bash", "-c", both)
    assert ended.returncode == 0, ended.stderr
    for number in "01":
        printed = (tmp_path / number).read_text()
        assert places(printed) == [(0, 1, 0, 2, "host0"), (0, 1, 1, 2, "host1")]


# --- the secret ----------------------------------------------------------------------

# Prints the results of reading several credentials, one after the other.
CREDENTIALS = """
import os, subprocess, time
from keras_hvd.world.launchers import munge

def say(credential):
    try:
        print(munge.decode(credential))
    except munge.CredentialError as error:
        print(error)

own = munge.encode(b"once", os.geteuid())
say(own)
say(own)
say(munge.encode(b"for another one", 65534))
say(munge.encode(b"by another one", os.geteuid())[:-9] + b"x" * 8)
say(b"no credential")
late = subprocess.check_output(["munge", "--ttl=1", "--string=late"])
# Its clock counts whole seconds.
time.sleep(2.1)
say(late.strip())
"""


def test_a_credential_serves_one_user_once_and_for_a_while(cluster):
    ended = subprocess.run(
        cluster.command(sys.executable, "-c", CREDENTIALS),
        capture_output=True,
        text=True,
        timeout=60,
    )
    once, replayed, others, cut, none, late = ended.stdout.splitlines()
    assert once == "(b'once', 0)", ended.stderr
    assert replayed.startswith("Replayed credential")
    assert others.startswith("Unauthorized credential")
    assert not cut.startswith("(") and not none.startswith("(")
    assert late.startswith("Expired credential")


# Rank 0's node already has these at the step's ports when rank 0 comes.
STRANGERS = """
import os, secrets, signal, socket, struct, sys
from allreduce_loop import allreduce
import keras_hvd
from keras_hvd import environment
from keras_hvd.world.launchers import munge

def answer(what, question):
    if what == "another user's":
        return framed(munge.encode(b"{}", 0))
    if what == "replayed":
        return framed(munge.encode(b'{"step": "a", "nonce": "", "addresses": []}', 0))
    if what == "no object":
        return framed(munge.encode(b"[1]", 0))
    if what == "garbage":
        return framed(secrets.token_bytes(500))
    if what == "endless":
        return struct.pack("!I", 0xFFFFFFFF)
    return b""

def framed(credential):
    return struct.pack("!I", len(credential)) + credential

def serve(listening, what):
    while True:
        accepted, _ = listening.accept()
        question = accepted.recv(1 << 10)
        accepted.sendall(answer(what, question))
        accepted.close()

world = environment.world()
if world.rank == 0:
    listening = socket.create_server(("", world.way.ports()[0]))
    ready, go = os.pipe()
    if os.fork() == 0:
        if sys.argv[1] == "another user's":
            os.setuid(65534)
        os.write(go, b"!")
        serve(listening, sys.argv[1])
    os.read(ready, 1)
    listening.close()
try:
    keras_hvd.init()
    print(f"rank {keras_hvd.rank()} of {keras_hvd.size()}", flush=True)
    allreduce("both have said it", 1)
finally:
    if world.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
"""


@pytest.mark.parametrize(
    "what", ["another user's", "replayed", "no object", "garbage", "endless", "nothing"]
)
def test_a_stranger_at_the_first_port_is_passed_over(cluster, what):
    ended = cluster.run(
        *("srun", "-N", "2", "-n", "2", "setsid", "--wait"),
        *(sys.executable, "-c", STRANGERS, what),
        PYTHONPATH=str(RANKS),
    )
    assert sorted(ended.stdout.split("\n"))[1:] == ["rank 0 of 2", "rank 1 of 2"], (
        ended.stderr
    )


# Runs a command as on a node without a munged.
WITHOUT_MUNGE = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'umount /run/munge && exec "$@"',
    "-",
)


def test_without_munge_the_error_says_what_to_set(cluster):
    ended = cluster.run("srun", "-N", "2", "-n", "2", *WITHOUT_MUNGE, *PLACE)
    assert ended.returncode != 0
    assert "rank 0 hands the others a secret by MUNGE" in ended.stderr
    assert re.search("MUNGE cannot be used on host[01]: .*: start munged", ended.stderr)
    assert "KERAS_HVD_SECRET_FILE to a file" in ended.stderr


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_without_munge_is_named_and_missed_by_the_other(cluster, node):
    without = shlex.join([*WITHOUT_MUNGE, *map(str, PLACE)])
    chosen = f'[ "$SLURM_NODEID" = {node} ] && exec {without}; exec "$@"'
    ended = cluster.run(
        *("srun", "-N", "2", "-n", "2", "sh", "-c", chosen, "-", *PLACE),
        KERAS_HVD_INIT_TIMEOUT_SECONDS="4",
    )
    assert ended.returncode != 0
    assert f"MUNGE cannot be used on host{node}: " in ended.stderr
    missed = ["rank 1 could not reach rank 0", "rank 1 of 2 did not come"]
    assert missed[node] in ended.stderr
    assert re.search("ook at (rank 0's own error|their own errors)", ended.stderr)


def test_a_secret_of_the_user_s_serves_instead_of_munge(cluster, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("only these ranks know this text")
    secret.chmod(0o600)
    ended = cluster.run(
        *("srun", "-N", "2", "-n", "2", *WITHOUT_MUNGE, *PLACE),
        KERAS_HVD_SECRET_FILE=str(secret),
    )
    assert ended.returncode == 0, ended.stderr
    assert places(ended.stdout) == [(0, 1, 0, 2, "host0"), (0, 1, 1, 2, "host1")]


def test_a_place_of_the_user_s_serves_instead_of_the_first_node(cluster, tmp_path):
    ended = cluster.run(
        *("srun", "-N", "2", "-n", "2", *WITHOUT_MUNGE, *PLACE),
        KERAS_HVD_SECRET="only these ranks know this text",
        KERAS_HVD_RENDEZVOUS=f"{cluster.hosts[0].address}:29400",
    )
    assert ended.returncode == 0, ended.stderr
    assert places(ended.stdout) == [(0, 1, 0, 2, "host0"), (0, 1, 1, 2, "host1")]


# --- failures ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("kill", "was killed by SIGKILL"),
        ("raise", "has left"),
        ("exit", "has left"),
    ],
)
def test_all_are_gone_soon_after_a_rank(cluster, tmp_path, how, why):
    words = (sys.executable, RANKS / "failing.py", how, tmp_path)
    ended = cluster.run("srun", "-N", "2", "-n", "3", *words)
    now = time.monotonic()
    assert ended.returncode != 0
    (failed, _) = json.loads((tmp_path / "failing.json").read_text())
    raised = [json.loads(one.read_text()) for one in tmp_path.glob("raised-*.json")]
    assert len(raised) == 2, ended.stderr
    for when, text in raised:
        assert when - failed < 4
        assert re.search(f"rank 1 .*{why}", text)
    assert now - failed < 15
    assert re.search(f"rank 1 .*{why}", ended.stderr)


# Steps without end.
CUT_OFF = """
import json, os, sys, time
import keras_hvd
from allreduce_loop import allreduce
keras_hvd.init()
allreduce("first", 1)
path = os.path.join(sys.argv[1], str(keras_hvd.rank()))
with open(path + ".pid", "w") as file:
    print(os.getpid(), file=file)
allreduce("second", 1)
os.rename(path + ".pid", path)
try:
    while True:
        # A step's computation.
        time.sleep(float(sys.argv[2]))
        allreduce("step", 1 << 18)
except keras_hvd.KerasHvdError as error:
    with open(path + ".error", "w") as file:
        print(json.dumps([time.monotonic(), str(error)]), file=file)
    raise
"""


@pytest.mark.parametrize(
    "between", [pytest.param("0", id="in"), pytest.param("0.3", id="between")]
)
def test_all_are_gone_soon_after_a_node_is_cut_off(cluster, tmp_path, between):
    words = [sys.executable, "-c", CUT_OFF, str(tmp_path), between]
    command = ["srun", "-N", "2", "-n", "3", *words]
    with cluster.start(*command, variables={"PYTHONPATH": str(RANKS)}) as job:
        try:
            pids = [_appears(tmp_path / str(rank)) for rank in range(3)]
            cluster.hosts[1].unplug()
            cut = time.monotonic()
            errors = [_appears(tmp_path / f"{rank}.error") for rank in range(3)]
            for pid in pids:
                _await_end(int(pid))
            assert time.monotonic() - cut < 20
        finally:
            cluster.hosts[1].plug_in()
            job.terminate()
            job.communicate(timeout=60)
    for when, text in map(json.loads, errors):
        assert when - cut < 10
        assert re.search(r"rank \d \(pid \d+ on host[01]\) cannot be reached", text)


def test_a_batch_job_runs_in_its_allocation_and_scancel_ends_all_ranks(
    cluster, tmp_path
):
    step = ["srun", sys.executable, "-c", CUT_OFF, str(tmp_path), "0"]
    script, output = tmp_path / "job.sh", tmp_path / "output"
    script.write_text(f"#!/bin/sh\n{shlex.join(step)}\n")
    options = ("--parsable", "-N", "2", "-n", "3", "-o", output)
    submitted = cluster.run("sbatch", *options, script, PYTHONPATH=str(RANKS))
    assert submitted.returncode == 0, submitted.stderr
    pids = [_appears(tmp_path / str(rank)) for rank in range(3)]
    ended = cluster.run("scancel", submitted.stdout.strip())
    cancelled = time.monotonic()
    assert ended.returncode == 0, ended.stderr
    for pid in pids:
        _await_end(int(pid))
    assert time.monotonic() - cancelled < 15
    _appears(output, "CANCELLED")


def _appears(path: Path, wanted: str = "") -> str:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(FileNotFoundError):
            text = path.read_text()
            if text and wanted in text:
                return text
        assert time.monotonic() < deadline, f"{path.name} does not appear"
        time.sleep(0.02)


def _await_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.02)


def test_tasks_join_a_membership_service(cluster, tmp_path):
    khvdrun = (sys.executable, "-m", "keras_hvd.launch")
    place = f"{cluster.hosts[0].address}:29400"
    variables = {"KERAS_HVD_SECRET": "the one of the service and the tasks", **COUNTS}
    served = *khvdrun, "--membership", place, "-np", "4", "--min-np", "2"
    joined = *khvdrun, "--join", place, "-np", "2"
    script = sys.executable, SCRIPT, tmp_path, "3", "7"
    with cluster.start(*served, variables=variables) as service:
        ended = cluster.run("srun", "-N", "2", "-n", "2", *joined, *script, **variables)
        _, said = service.communicate(timeout=60)
    assert [service.returncode, ended.returncode] == [0, 0], said + ended.stderr
    seen = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
    assert [each["sizes"] for each in seen] == [[4, 3]] * 3
