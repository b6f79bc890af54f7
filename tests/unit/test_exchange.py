"""The call of `run` on its way to ranks of several hosts, and other connections."""

import contextlib
import os
import pickle
import socket
import struct
import threading
import time

import pytest

from keras_hvd.exceptions import RendezvousError
from keras_hvd.launch import exchange
from keras_hvd.launch.call import memory_file
from keras_hvd.launch.exchange import Caller, Exchange
from keras_hvd.world.rendezvous import address, connection
from keras_hvd.world.rendezvous.connection import Call, ProvenConnection
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.proof import HELLO_BYTES, Purpose, Role, hello
from keras_hvd.world.rendezvous.secret import Secret

HERE = {
    "KERAS_HVD_NETWORK_INTERFACES": "lo",
    "KERAS_HVD_INIT_TIMEOUT_SECONDS": "5",
}
# Longer than the pieces in which it travels.
CALL = os.urandom((3 << 20) + 7)
LATEST = 20
# For calls that are tried again, because a host has several addresses.
SOON = {"KERAS_HVD_INIT_TIMEOUT_SECONDS": "1"}


def file(content: bytes = b""):
    made = memory_file("of a test")
    made.write(content)
    made.flush()
    return made


@contextlib.contextmanager
def serving(ranks: int = 2, **variables: str):
    """An exchange with `ranks` ranks."""
    with Exchange(file(CALL), ranks, {**HERE, **variables}) as made:
        yield made


def outcomes(made: Exchange) -> dict[int, bytes]:
    """What ranks have handed over."""
    return {each.rank: each.outcome.read() for each in made.arrived}


def caller(made: Exchange, rank: int, size: int = 2, **variables: str) -> Caller:
    given = {**HERE, **made.variables, **variables}
    return Caller(given, rank, size)


def take_part(made: Exchange, rank: int, outcome: bytes, **variables: str) -> None:
    """Takes the call and hands over an outcome, as a rank does."""
    own = caller(made, rank, **variables)
    got = file()
    own.ask(got)
    assert got.read() == CALL
    own.tell(file(outcome), has_failed=False, age=0.5)


def place(made: Exchange) -> tuple[str, int]:
    return address.parse(made.variables["KERAS_HVD_CALLER"].split(",")[0])


async def connect(made: Exchange, rank: int = 1) -> ProvenConnection:
    """Connects as a rank that knows the secret."""
    text = made.variables["KERAS_HVD_CALLER_SECRET"]
    key = Secret(text.encode()).key(f"keras_hvd.run {text}")
    call = Call(key, Purpose.CALL, rank, 0)
    deadline = time.monotonic() + LATEST
    return await connection.connect(call, lambda: [place(made)], deadline)


async def take_the_call(made: Exchange) -> ProvenConnection:
    """Connects as rank 1, which has yet to hand over an outcome."""
    proven = await connect(made)
    await proven.send(FIRST)
    await proven.receive(1000)
    received = 0
    while received < len(CALL):
        received += len(await proven.receive_packed(1 << 20))
    return proven


def test_each_rank_gets_the_call_and_hands_over_its_outcome():
    large = os.urandom((5 << 20) + 1)
    with serving() as made:
        before = time.monotonic()
        take_part(made, 1, large)
        take_part(made, 0, b"")
        after = time.monotonic()
    assert [each.outcome.read() for each in made.arrived] == [large, b""]
    assert made.hosts == dict.fromkeys((0, 1), socket.gethostname())
    first, second = made.arrived
    assert (first.rank, second.rank) == (1, 0)
    assert before - 0.5 <= first.raised_at <= second.raised_at <= after - 0.5
    assert made.lost == {}


def test_the_variables_are_not_left_to_programs_of_the_rank():
    with serving() as made:
        given = {**HERE, **made.variables}
        Caller(given, 0, 2)
    assert given == HERE


def test_a_wrong_secret_is_refused_and_named_nowhere():
    with serving() as made:
        wrong = caller(made, 1, KERAS_HVD_CALLER_SECRET="f" * 64, **SOON)
        with pytest.raises(RendezvousError, match="it has another secret") as raised:
            wrong.ask(file())
        assert made.hosts == {}
        take_part(made, 1, b"of rank 1")
    assert f"rank 1 on {socket.gethostname()} cannot speak with" in str(raised.value)
    assert "f" * 64 not in str(raised.value)
    assert made.variables["KERAS_HVD_CALLER_SECRET"] not in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(os.urandom(4096), id="random"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".ljust(200), id="http"),
        pytest.param(pickle.dumps(print).ljust(200), id="pickle"),
        pytest.param(struct.pack("!I", 2**32 - 1) * 64, id="lengths"),
        pytest.param(
            hello(Role.CLIENT, Purpose.RANKS, 1, 0).pack(), id="other-purpose"
        ),
        pytest.param(hello(Role.CLIENT, Purpose.CALL, -1, 0).pack(), id="no-rank"),
        pytest.param(b"KHVD", id="too-little"),
    ],
)
def test_who_speaks_otherwise_gets_no_answer(monkeypatch, content):
    monkeypatch.setattr(connection, "PROOF_SECONDS", 0.5)
    with serving() as made:
        with socket.create_connection(place(made), timeout=LATEST) as stranger:
            stranger.sendall(content)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        take_part(made, 0, b"of rank 0")
    assert list(made.hosts) == [0] and made.lost == {}
    assert outcomes(made) == {0: b"of rank 0"}


def test_who_only_says_hello_gets_nothing_that_depends_on_the_secret():
    answer = b""
    with (
        serving() as made,
        socket.create_connection(place(made), timeout=LATEST) as stranger,
    ):
        stranger.sendall(hello(Role.CLIENT, Purpose.CALL, 1, 0).pack() + bytes(32))
        while part := stranger.recv(1000):
            answer += part
    # The server's own hello, and a refusal.
    assert answer[HELLO_BYTES:] == bytes(32)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(struct.pack("!I32s", 2**32 - 1, b""), id="length"),
        pytest.param(struct.pack("!I32s", 2, b"") + b"{}", id="no-seal"),
    ],
)
def test_a_first_message_that_is_too_large_or_changed_is_not_taken(sent):
    async def break_the_rules():
        proven = await connect(made)
        await proven.stream.send(sent)
        with pytest.raises(OSError, match="closed|reset"):
            await proven.stream.receive(1)
        proven.stream.close()

    with serving() as made:
        EventLoop().run(break_the_rules())
        assert made.hosts == {}
        take_part(made, 1, b"of rank 1")


FIRST = {"host": "elsewhere", "size": 2}


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param([{"age": 0.0, "bytes": -1}, {}], id="negative"),
        pytest.param([{"age": 0.0, "bytes": "9"}], id="text"),
        pytest.param([{"age": 0.0, "bytes": True}], id="bool"),
        pytest.param([{"age": None, "bytes": 9}], id="no-age"),
        pytest.param([{"age": 0.0, "bytes": 2**70}, b"a part"], id="no-end"),
        pytest.param([{"age": 0.0, "bytes": 9}, b"more than that"], id="more"),
        pytest.param([{"age": 0.0, "bytes": 2 << 20}, bytes(2 << 20)], id="at-once"),
    ],
)
def test_an_outcome_that_is_none_is_a_lost_rank(sent):
    async def break_the_rules():
        proven = await take_the_call(made)
        with contextlib.suppress(ConnectionError):
            for one in sent:
                speak = proven.send if isinstance(one, dict) else proven.send_packed
                await speak(one)
        proven.stream.close()

    with serving() as made:
        EventLoop().run(break_the_rules())
        take_part(made, 0, b"of rank 0")
        await_lost(made)
    assert list(made.lost) == [1]
    assert outcomes(made) == {0: b"of rank 0"}


def await_lost(made: Exchange) -> None:
    """Makes the exchange serve the connections that have arrived, in their order."""
    with contextlib.suppress(RendezvousError):
        caller(made, 1).ask(file())


def test_a_rank_that_ends_without_an_outcome_is_known_at_once():
    async def come(rank):
        proven = await connect(made, rank)
        await proven.send(FIRST)
        await proven.receive(1000)
        return proven

    with serving() as made:
        both = [EventLoop().run(come(rank)) for rank in range(2)]
        for rank in (1, 0):
            both[rank].stream.close()
            deadline = time.monotonic() + LATEST
            while rank not in made.lost and time.monotonic() < deadline:
                os.sched_yield()
    assert list(made.lost.items()) == [(1, ""), (0, "")]


def test_a_child_of_a_rank_does_not_keep_its_connection():
    with serving() as made:
        rank = caller(made, 1)
        rank.ask(file())
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(go)
            os.read(ready, 1)
            os._exit(0)
        rank._proven.stream.close()
        deadline = time.monotonic() + LATEST
        while 1 not in made.lost and time.monotonic() < deadline:
            os.sched_yield()
        os.close(go)
        os.waitpid(child, 0)
        os.close(ready)
        assert made.lost == {1: ""}


def test_what_was_changed_on_its_way_is_said():
    async def change():
        proven = await take_the_call(made)
        await proven.stream.send(bytes(100))
        with contextlib.suppress(ConnectionError):
            await proven.stream.receive(1)
        proven.stream.close()

    with serving() as made:
        EventLoop().run(change())
        await_lost(made)
    assert made.lost == {1: "it was changed on its way"}


def test_if_outcomes_can_no_longer_be_taken_the_job_is_ended(monkeypatch):
    ended = threading.Event()

    def fail(*_):
        raise RendezvousError("no descriptor is left")

    monkeypatch.setattr(Exchange, "_await_end", fail)
    with pytest.raises(RendezvousError, match="no descriptor is left"):
        made = Exchange(file(CALL), 2, HERE)
        made.on_late = ended.set
        with made:
            assert ended.wait(LATEST)


def test_each_rank_comes_once():
    async def come_and_go():
        proven = await connect(made, 1)
        await proven.stream.send(b"too little")
        proven.stream.close()

    with serving() as made:
        take_part(made, 1, b"of rank 1")
        EventLoop().run(come_and_go())
        with pytest.raises(RendezvousError, match="rank 1 has come from .* already"):
            caller(made, 1).ask(file())
    assert made.lost == {}
    assert outcomes(made) == {1: b"of rank 1"}


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (2, 3)])
def test_a_rank_of_another_job_is_told_so(rank, size):
    with serving() as made:
        stranger = caller(made, rank, size)
        message = f"it is of a job of {size}, and keras_hvd.run started 2 ranks"
        with pytest.raises(RendezvousError, match=message):
            stranger.ask(file())
    assert made.hosts == {}


def test_another_version_is_named(monkeypatch):
    with serving() as made:
        monkeypatch.setattr(exchange, "__version__", "9.9")
        with pytest.raises(
            RendezvousError, match=r"rank 0 on .* have keras_hvd 9\.9 and"
        ):
            caller(made, 0).ask(file())
    assert made.hosts == {}


def test_a_caller_that_cannot_be_reached_is_an_error_in_time():
    with serving() as made:
        own = caller(made, 1, **SOON)
    with pytest.raises(RendezvousError, match="rank 1 .*Connection refused"):
        own.ask(file())


def test_a_secret_in_a_file_need_not_travel(tmp_path):
    files = []
    for number in range(2):
        files.append(tmp_path / str(number))
        files[-1].write_text(f"the text of file {number}, and long enough")
        files[-1].chmod(0o600)
    with serving(KERAS_HVD_SECRET_FILE=str(files[0])) as made:
        for other in ("", str(files[1])):
            with pytest.raises(RendezvousError, match="it has another secret"):
                caller(made, 1, KERAS_HVD_SECRET_FILE=other, **SOON).ask(file())
        take_part(made, 1, b"of rank 1", KERAS_HVD_SECRET_FILE=str(files[0]))
    assert outcomes(made) == {1: b"of rank 1"}


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_nothing_goes_in_the_clear_if_either_end_wants_tls(wanted):
    with serving(KERAS_HVD_TLS=wanted) as made:
        other = caller(made, 0, KERAS_HVD_TLS=str(1 - int(wanted)))
        with pytest.raises(RendezvousError, match="KERAS_HVD_TLS=1 is for all or none"):
            other.ask(file())
        assert made.hosts == {}
        own = caller(made, 1, KERAS_HVD_TLS=wanted)
        own.ask(file())
        assert (own._proven.stream.tls is not None) == (wanted == "1")


def test_a_rank_without_tls_is_not_sent_the_call_in_the_clear():
    async def go_on():
        proven = await connect(made)
        await proven.send(FIRST)
        with pytest.raises(OSError, match="closed|reset"):
            await proven.receive(1000)
        proven.stream.close()

    with serving(KERAS_HVD_TLS="1") as made:
        EventLoop().run(go_on())
    assert made.hosts == {}


def test_a_failure_that_does_not_end_the_job_is_reported(monkeypatch):
    monkeypatch.setattr(exchange, "_LATE_SECONDS", 0.01)
    ended = []
    with serving() as made:
        made.on_late = lambda: ended.append(time.monotonic())
        take_part(made, 0, b"of rank 0")
        own = caller(made, 1)
        own.ask(file())
        assert ended == []
        own.tell(file(b"of rank 1"), has_failed=True, age=0.0)
        told = time.monotonic()
        deadline = told + LATEST
        while not ended and time.monotonic() < deadline:
            os.sched_yield()
    assert len(ended) == 1
