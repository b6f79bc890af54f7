"""The way for ranks of a Slurm step to learn where to meet, and attacks on it.

Credentials are those of a real munged, which this starts.
"""

import contextlib
import functools
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keras_hvd.exceptions import RendezvousError
from keras_hvd.world.launchers import munge
from keras_hvd.world.launchers.launcher import World
from keras_hvd.world.launchers.slurm import Step
from keras_hvd.world.rendezvous import connection, network_interfaces, ranks, secret
from keras_hvd.world.rendezvous.ranks import RankIdentity

ROOT = Path(__file__).resolve().parents[3]
LATEST = 20
NOBODY = 65534
QUESTION = struct.Struct("!8s32s80s")
MAGIC = b"KHVDSLU\x01"
SOCKET = Path("/run/munge/munge.socket.2")


@pytest.fixture(scope="module")
def munged(tmp_path_factory) -> Iterator[None]:
    """A munged where the library looks for it, unless there is one."""
    if SOCKET.exists():
        yield
        return
    program = shutil.which("munged", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or os.geteuid() != 0:
        pytest.skip("there can be no munged here: it takes root, and its package")
    folder = tmp_path_factory.mktemp("munge")
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    SOCKET.parent.mkdir(mode=0o755, exist_ok=True)
    names = ("key", "log", "pid", "seed")
    files = [f"--{name}-file={folder / name}" for name in names]
    process = subprocess.Popen(
        [program, "--foreground", "--force", *files],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ends = time.monotonic() + LATEST
        while not SOCKET.exists():
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(autouse=True)
def quick_proofs(monkeypatch) -> None:
    monkeypatch.setattr(connection, "PROOF_SECONDS", 0.5)


@pytest.fixture(autouse=True)
def no_secret(monkeypatch) -> None:
    monkeypatch.setattr(secret, "_taken", None)
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    monkeypatch.delenv(secret.FILE_VARIABLE, raising=False)


@pytest.fixture
def step() -> Step:
    """A step whose ports are free."""
    for number in range(os.getpid(), os.getpid() + 1000):
        found = Step(f"slurm-{number}.0", "localhost", is_on_first_node=True)
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            for port in found.ports():
                opened.enter_context(listening(port))
            return found
    raise RuntimeError("no free ports")


def listening(port: int) -> socket.socket:
    return socket.create_server((own_address(), port))


def own_address() -> str:
    """The first address at which rank 0 listens."""
    return network_interfaces.reachable(())[0]


class Ranks:
    """Ranks of a step that meet, in threads of this process."""

    def __init__(self, threads, step: Step, timeout: float):
        self._threads = threads
        self._step = step
        self._timeout = timeout

    def start(self, rank: int, size: int = 2, timeout: float | None = None) -> None:
        name = self._step.name, rank
        self._threads.start(name, self.meet, rank, size, timeout)

    def meet(
        self, rank: int, size: int = 2, timeout: float | None = None
    ) -> ranks.Meeting:
        """Meets the others as a rank does."""
        timeout = timeout or self._timeout
        place = RankIdentity(rank, size, 0, 1, self._step.name, host_key=f"host {rank}")
        world = World(rank, 2, 0, 1, None, None, self._step.name)
        point = self._step.arrange(world, [0, 1], place, timeout)
        return ranks.meet(place, point, lambda *_: [], timeout)

    def connect(self, port: int | None = None) -> socket.socket:
        """A connection to rank 0, when it listens."""
        ends = time.monotonic() + LATEST
        while True:
            where = own_address(), port or self._step.ports()[0]
            try:
                return socket.create_connection(where, timeout=LATEST)
            except ConnectionRefusedError:
                assert time.monotonic() < ends


@pytest.fixture
def job(threads, step, munged) -> Ranks:
    return Ranks(threads, step, LATEST)


def assert_all_met(threads) -> None:
    for one in threads.end().values():
        assert isinstance(one, ranks.Meeting), one


def error_of(threads) -> str:
    """The error of the only rank."""
    (error,) = threads.errors().values()
    return error


def question(step: Step, nonce: bytes = bytes(32)) -> bytes:
    return QUESTION.pack(MAGIC, nonce, step.name.encode())


def everything(connected: socket.socket) -> bytes:
    """All bytes until the other end closes."""
    content = b""
    with contextlib.suppress(ConnectionResetError):
        while received := connected.recv(1 << 16):
            content += received
    return content


def credential_for(step: Step, connected: socket.socket, nonce: bytes) -> bytes:
    """The credential that rank 0 answers with."""
    connected.sendall(question(step, nonce))
    return everything(connected)[4:]


# --- as it should be ------------------------------------------------------------------


def test_ranks_meet_with_a_fresh_secret(job, threads):
    for rank in (2, 1, 0):
        job.start(rank, size=3)
    assert_all_met(threads)


def test_a_taken_port_is_passed_by(job, threads, step):
    with listening(step.ports()[0]), listening(step.ports()[1]):
        job.start(0)
        # The listener at the first ports says nothing, and is left after a while.
        with job.connect(step.ports()[2]):
            job.start(1)
            assert_all_met(threads)


@pytest.mark.parametrize("count", [2, 4, 50])
def test_the_ports_are_those_that_a_firewall_lets_pass(step, monkeypatch, count):
    monkeypatch.setenv("KERAS_HVD_PORTS", f"30000-{30000 + count - 1}")
    assert len(step.ports()) == min(4, count)
    assert {*step.ports()} <= {*range(30000, 30000 + count)}


def test_where_all_ports_are_taken_rank_0_says_so(job, threads, step):
    with contextlib.ExitStack() as opened:
        for port in step.ports():
            opened.enter_context(listening(port))
        job.start(0)
        error = error_of(threads)
    first, *_, last = step.ports()
    assert f"cannot listen at any port from {first} to {last} of localhost" in error
    assert "set KERAS_HVD_RENDEZVOUS to HOST:PORT of this node" in error


@pytest.mark.parametrize("text", ["", "only these ranks know this text"])
def test_two_steps_at_the_same_ports_do_not_mix(job, threads, step, monkeypatch, text):
    if text:
        monkeypatch.setenv("KERAS_HVD_SECRET", text)
        secret.take(os.environ)
    ports = step.ports()
    monkeypatch.setattr(Step, "ports", lambda self: ports)
    other = Step(step.name + "1", step.first_node, is_on_first_node=True)
    for each in (job, Ranks(threads, other, LATEST)):
        for rank in (0, 1):
            each.start(rank)
    assert_all_met(threads)


def test_who_is_refused_at_another_step_goes_on_looking(
    job, threads, step, monkeypatch
):
    monkeypatch.setenv("KERAS_HVD_SECRET", "only these ranks know this text")
    secret.take(os.environ)
    ports = step.ports()
    monkeypatch.setattr(Step, "ports", lambda self: ports)
    other = Step(step.name + "1", step.first_node, is_on_first_node=True)
    job.start(0)
    job.connect().close()
    began = time.monotonic()
    with pytest.raises(RendezvousError, match="it has another secret, or another job"):
        Ranks(threads, other, timeout=1).meet(1)
    assert time.monotonic() - began > 0.5
    job.start(1)
    assert_all_met(threads)


# --- without munge --------------------------------------------------------------------


@pytest.fixture
def no_library(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(munge, "_LIBRARY", "libmunge-is-not-here.so")
    munge._library.cache_clear()
    yield
    munge._library.cache_clear()


def test_without_the_library_a_secret_is_asked_for(threads, step, no_library):
    Ranks(threads, step, LATEST).start(0)
    error = error_of(threads)
    assert f"MUNGE cannot be used on {socket.gethostname()}" in error
    assert "libmunge-is-not-here.so: cannot open" in error
    assert "set KERAS_HVD_SECRET to" in error and "KERAS_HVD_SECRET_FILE" in error
    # Rank 0 listens no more.
    listening(step.ports()[0]).close()


def test_a_secret_of_the_user_needs_no_munge(threads, step, monkeypatch, no_library):
    monkeypatch.setenv("KERAS_HVD_SECRET", "only these ranks know this text")
    secret.take(os.environ)
    job = Ranks(threads, step, LATEST)
    with listening(step.ports()[0]):
        job.start(0)
        job.start(1)
        assert_all_met(threads)


# Mounts of its own, without another munged.
ALONE = """
mount -t tmpfs none /run/munge 2>&1 && exec "$0" -c '
import sys
from keras_hvd.world.launchers import slurm
from keras_hvd.world.rendezvous.ranks import RankIdentity
step = slurm.Step("slurm-1.0", "localhost", is_on_first_node=True)
world = slurm.World(0, 2, 0, 1, None, None, "slurm-1.0")
step.arrange(world, [0, 1], RankIdentity(0, 2, 0, 1), 1)
'
"""


def test_a_munged_that_does_not_run_is_named(munged):
    words = ["unshare", "--mount", "--net", "sh", "-c", ALONE, sys.executable]
    ended = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ROOT}
    )
    if "RendezvousError" not in ended.stderr and "unshare" in ended.stderr:
        pytest.skip(ended.stderr)
    assert "MUNGE cannot be used on" in ended.stderr
    assert "start munged" in ended.stderr and "KERAS_HVD_SECRET" in ended.stderr


# --- strangers ------------------------------------------------------------------------

# A process of another user that tries a credential.
AS_NOBODY = """
import os, sys
from keras_hvd.world.launchers import munge
os.setgid(65534), os.setuid(65534)
try:
    print(munge.decode(sys.stdin.buffer.read()))
except munge.CredentialError as error:
    print("refused:", error)
"""


def test_another_user_can_ask_and_cannot_read(job, threads, step):
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    job.start(0)
    with job.connect() as stranger:
        credential = credential_for(step, stranger, bytes(32))
    tried = subprocess.run(
        [sys.executable, "-c", AS_NOBODY],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=credential,
        capture_output=True,
        check=True,
    ).stdout.decode()
    assert tried.startswith("refused: Unauthorized credential for client UID=65534")
    # Nothing in it can be read.
    assert b"secret" not in credential and b"addresses" not in credential
    job.start(1)
    assert_all_met(threads)


def impostor(step: Step, answers) -> threading.Thread:
    """Listens at the step's first port before rank 0 does, and answers questions."""
    taken = listening(step.ports()[0])

    def serve() -> None:
        with taken, contextlib.suppress(OSError):
            while True:
                client, _ = taken.accept()
                with client:
                    asked = client.recv(QUESTION.size, socket.MSG_WAITALL)
                    if asked[:8] == MAGIC:
                        client.sendall(answers(asked))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def framed(content: bytes) -> bytes:
    return struct.pack("!I", len(content)) + content


def made_by_nobody(content: dict) -> bytes:
    """A credential of another user, for this one."""
    program = (
        "import os, sys\n"
        "from keras_hvd.world.launchers import munge\n"
        f"os.setgid({NOBODY}), os.setuid({NOBODY})\n"
        "sys.stdout.buffer.write(munge.encode(sys.stdin.buffer.read(), 0))"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=json.dumps(content).encode(),
        capture_output=True,
        check=True,
    ).stdout


def told(step: Step, asked: bytes) -> dict:
    nonce = asked[8:40].hex()
    place = [own_address(), step.ports()[0]]
    secret_text = "00" * 32
    return dict(step=step.name, nonce=nonce, addresses=[place], secret=secret_text)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(
            lambda step, asked: framed(made_by_nobody(told(step, asked))),
            f"it is a process of user {NOBODY}",
            id="another-user",
        ),
        pytest.param(
            lambda step, asked: framed(
                munge.encode(
                    json.dumps({**told(step, asked), "nonce": "00" * 32}).encode(), 0
                )
            ),
            "it repeats what was sent before",
            id="another-nonce",
        ),
        pytest.param(
            lambda step, asked: framed(
                munge.encode(
                    json.dumps({**told(step, asked), "step": "slurm-0.0"}).encode(), 0
                )
            ),
            "it repeats what was sent before",
            id="another-step",
        ),
        pytest.param(
            lambda step, asked: framed(munge.encode(b"{}", NOBODY)),
            "MUNGE refuses what it sent: Unauthorized credential",
            id="for-another-user",
        ),
        pytest.param(
            lambda step, asked: framed(b"MUNGE:" + b"A" * 200 + b":"),
            "MUNGE refuses what it sent",
            id="no-credential",
        ),
        pytest.param(
            lambda step, asked: framed(os.urandom(65536)),
            "MUNGE refuses what it sent",
            id="random",
        ),
        pytest.param(
            lambda step, asked: struct.pack("!I", 65537),
            "it does not speak as keras_hvd does",
            id="too-long",
        ),
        pytest.param(
            lambda step, asked: framed(b""), "MUNGE refuses what it sent", id="empty"
        ),
    ],
)
def test_who_stands_in_for_rank_0_is_found_out(
    job, threads, step, monkeypatch, answer, reason
):
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    # Another user's answer takes a process, which may start slowly.
    monkeypatch.setattr(connection, "PROOF_SECONDS", LATEST)
    impostor(step, functools.partial(answer, step))
    job.start(1, timeout=5 if reason.startswith("it is a process") else 0.6)
    error = error_of(threads)
    assert "rank 1 could not reach rank 0 at any port from" in error
    assert reason in error
    # And with rank 0, which has the next port, they meet.
    job.start(0)
    job.start(1)
    assert_all_met(threads)


def test_a_replayed_credential_is_refused(munged):
    credential = munge.encode(b"content", os.geteuid())
    assert munge.decode(credential) == (b"content", os.geteuid())
    with pytest.raises(munge.CredentialError, match="Replayed credential"):
        munge.decode(credential)


def test_an_expired_credential_is_refused(munged):
    made = subprocess.run(
        ["munge", "--ttl", "1", "--string", "content"], capture_output=True, check=True
    ).stdout.strip()
    # Time itself has to pass, and munged counts whole seconds.
    time.sleep(2.1)
    with pytest.raises(munge.CredentialError, match="Expired credential"):
        munge.decode(made)


def test_a_changed_credential_is_refused(munged):
    credential = bytearray(munge.encode(b"content", os.geteuid()))
    credential[40] ^= 1
    with pytest.raises(munge.CredentialError):
        munge.decode(bytes(credential))


def test_who_passes_questions_on_learns_nothing(job, threads, step):
    seen = []

    def relay(asked: bytes) -> bytes:
        with job.connect(step.ports()[1]) as rank_0:
            rank_0.sendall(asked)
            seen.append(everything(rank_0))
        return seen[-1]

    impostor(step, relay)
    job.start(0)
    job.start(1)
    assert_all_met(threads)
    # The credential was rank 0's own, and unreadable for the process that passed it on.
    # A rank that has waited too long asks again.
    assert seen and all(passed[4:10] == b"MUNGE:" for passed in seen)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(os.urandom(4096), id="random"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".ljust(200), id="http"),
        pytest.param(QUESTION.pack(MAGIC, bytes(32), b"slurm-0.0"), id="another-step"),
        pytest.param(QUESTION.pack(b"KHVDSLU\x02", bytes(32), b""), id="version"),
    ],
)
def test_who_asks_otherwise_gets_no_answer(job, threads, content):
    job.start(0)
    with job.connect() as stranger:
        stranger.sendall(content)
        assert everything(stranger) == b""
    job.start(1)
    assert_all_met(threads)


def test_a_thousand_connections_keep_no_rank_out(job, threads):
    job.start(0)
    with contextlib.ExitStack() as opened:
        for _ in range(1000):
            opened.enter_context(job.connect())
        job.start(1)
        assert_all_met(threads)


def test_when_nobody_is_there_the_error_says_where_it_looked(job, threads, step):
    job.start(1, timeout=0.3)
    error = error_of(threads)
    first, *_, last = step.ports()
    assert f"rank 1 could not reach rank 0 at any port from {first} to {last}" in error
    assert "within 0.3 s" in error and "Look at rank 0's own error" in error


def test_errors_tell_nothing_of_what_came(job, threads, step):
    impostor(step, lambda asked: framed(munge.encode(b'{"secret": "hidden"}', 1)))
    job.start(1, timeout=0.6)
    assert "hidden" not in error_of(threads)
