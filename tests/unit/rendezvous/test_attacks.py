"""Attacks of strangers on ranks that meet, which bring them nothing.

Some know the protocol, some sit between two processes; none knows the secret.
"""

import contextlib
import itertools
import json
import math
import os
import socket
import struct
import threading
from collections.abc import Callable

import pytest

from keras_hvd.exceptions import RendezvousError
from keras_hvd.world.rendezvous import connection, listener, messages, proof
from keras_hvd.world.rendezvous.proof import Purpose, Role
from keras_hvd.world.rendezvous.ranks import Meeting
from keras_hvd.world.rendezvous.secret import Secret


def receive(connected: socket.socket, size: int) -> bytes:
    """Receives `size` bytes, or fewer if the other end closes."""
    content = b""
    with contextlib.suppress(ConnectionResetError):
        while len(content) < size:
            received = connected.recv(size - len(content))
            if not received:
                break
            content += received
    return content


def is_closed_without_an_answer(connected: socket.socket) -> bool:
    return receive(connected, 1) == b""


class Proxy:
    """Passes bytes on between a client and a server, and records and changes them.

    `change` gets each part and whether it is the server's, and returns its replacement.
    After `server_bytes` of the server it ends the connection.
    """

    def __init__(
        self,
        port: int,
        change: Callable[[bytes, bool], bytes] = lambda content, is_servers: content,
        server_bytes: float = math.inf,
    ):
        self.of_client = b""
        self.of_server = b""
        self._port = port
        self._change = change
        self._server_bytes = server_bytes
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except ConnectionRefusedError:
                client.close()
                continue
            for passing in (self._pass_clients, self._pass_servers):
                arguments = (client, server)
                threading.Thread(target=passing, args=arguments, daemon=True).start()

    def _pass_clients(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := client.recv(1 << 16):
                self.of_client += content
                server.sendall(self._change(content, False))
        end(client, server)

    def _pass_servers(self, client: socket.socket, server: socket.socket) -> None:
        left = self._server_bytes
        with contextlib.suppress(OSError):
            while left > 0 and (content := server.recv(min(left, 1 << 16))):
                left -= len(content)
                self.of_server += content
                client.sendall(self._change(content, True))
        end(client, server)


def end(*connections: socket.socket) -> None:
    for each in connections:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


# --- strangers that connect ----------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(os.urandom(4096), id="random"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".ljust(200), id="http"),
        pytest.param(
            proof.hello(Role.SERVER, Purpose.RANKS, 1, 0).pack(), id="servers-hello"
        ),
        pytest.param(
            proof.hello(Role.CLIENT, Purpose.NODES, 1, 0).pack(), id="other-purpose"
        ),
        pytest.param(struct.pack("!I", 2**31) * 64, id="lengths"),
        pytest.param(b'{"rank": 1, "size": 2}'.ljust(200), id="json"),
    ],
)
def test_who_speaks_otherwise_gets_no_answer(new_job, content):
    job = new_job(2)
    job.start(0)
    job.await_listening()
    with job.connect() as stranger:
        stranger.sendall(content)
        assert is_closed_without_an_answer(stranger)
        job.start(1)
        job.end()


@pytest.mark.parametrize("content", [b"", b"KHVD"])
def test_who_stays_silent_is_dropped_after_a_while(new_job, monkeypatch, content):
    monkeypatch.setattr(connection, "PROOF_SECONDS", 0.2)
    job = new_job(2)
    job.start(0)
    job.await_listening()
    with job.connect() as stranger:
        stranger.sendall(content)
        assert is_closed_without_an_answer(stranger)
    job.start(1)
    job.end()


def test_a_thousand_connections_keep_no_rank_out(new_job):
    job = new_job(4)
    job.start(0, "a")
    job.await_listening()
    with contextlib.ExitStack() as opened:
        strangers = [opened.enter_context(job.connect()) for _ in range(1000)]
        for rank in (1, 2, 3):
            job.start(rank, "abcd"[rank])
        meetings = job.end()
        assert [len(meeting.links) for meeting in meetings] == [6] * 4
        assert all(map(is_closed_without_an_answer, strangers))


def test_never_more_than_a_number_of_strangers_are_served(new_job, monkeypatch):
    monkeypatch.setattr(listener, "MOST_UNPROVEN", 3)
    job = new_job(2)
    job.start(0)
    with contextlib.ExitStack() as opened:
        job.await_listening()
        strangers = [opened.enter_context(job.connect()) for _ in range(8)]
        # The oldest first.
        assert all(map(is_closed_without_an_answer, strangers[:5]))
        for each in strangers[5:]:
            each.settimeout(0.1)
            with pytest.raises(TimeoutError):
                each.recv(1)
        job.start(1)
        job.end()


def test_a_wrong_secret_is_refused_and_named_nowhere(new_job):
    job = new_job(2, timeout=1)
    job.start(0)
    job.start(1, secret=Secret(b"of another job's ranks"))
    errors = job.errors()
    assert "rank 0 at" in errors[1]
    assert "refuses rank 1: it has another secret, or another job's name" in errors[1]
    assert "rank 1 of 2 did not come" in errors[0]
    assert (
        "Connections from 127.0.0.1 were refused: they have another secret" in errors[0]
    )
    for text in errors.values():
        assert "of another" not in text
        assert "only these tests know" not in text


def hello_of_rank_1() -> bytes:
    return proof.hello(Role.CLIENT, Purpose.RANKS, 1, 0).pack()


def test_the_server_proves_nothing_to_who_has_not_proven_first(new_job):
    job = new_job(2, timeout=1)
    job.start(0)
    job.await_listening()
    with job.connect() as stranger:
        stranger.sendall(hello_of_rank_1())
        assert len(receive(stranger, proof.HELLO_BYTES)) == proof.HELLO_BYTES
        stranger.sendall(bytes(proof.PROOF_BYTES))
        # A refusal, and no more.
        assert receive(stranger, 1000) == proof.REFUSAL
    assert "rank 1 of 2 did not come" in job.errors()[0]


def test_a_recorded_proof_proves_nothing_later(new_job):
    job = new_job(2)
    proxy = Proxy(job.port)
    job.start(0)
    job.start(1, rendezvous=proxy.address)
    job.end()
    recorded = proxy.of_client
    again = new_job(2, timeout=1)
    again.start(0)
    again.await_listening()
    with again.connect() as stranger:
        stranger.sendall(recorded)
        answer = receive(stranger, 1000)
    assert answer[proof.HELLO_BYTES :] in (proof.REFUSAL, b"")
    assert "rank 1 of 2 did not come" in again.errors()[0]


def test_a_recorded_server_proves_nothing_later(new_job):
    job = new_job(2)
    proxy = Proxy(job.port)
    job.start(0)
    job.start(1, rendezvous=proxy.address)
    job.end()
    again = new_job(2, timeout=1)
    with socket.create_server(("127.0.0.1", again.port)) as listening:
        again.start(1)
        client, _ = listening.accept()
        with client:
            client.sendall(proxy.of_server)
            assert receive(client, 1000)[proof.HELLO_BYTES + proof.PROOF_BYTES :] == b""
    assert "it does not know the secret" in again.errors()[1]


# --- reflection ----------------------------------------------------------------------


def test_what_the_server_sent_is_nothing_that_it_takes(new_job):
    job = new_job(2, timeout=1)
    job.start(0)
    job.await_listening()
    with job.connect() as one, job.connect() as other:
        one.sendall(hello_of_rank_1())
        of_server = receive(one, proof.HELLO_BYTES)
        other.sendall(of_server)
        assert is_closed_without_an_answer(other)
    assert "rank 1 of 2 did not come" in job.errors()[0]


def test_an_echo_is_no_rank_0(new_job):
    job = new_job(2, timeout=1)
    with socket.create_server(("127.0.0.1", job.port)) as listening:
        job.start(1)
        client, _ = listening.accept()
        with client:
            client.sendall(receive(client, proof.HELLO_BYTES))
            # No proof comes.
            assert is_closed_without_an_answer(client)
    assert "rank 1 could not reach rank 0" in job.errors()[1]


def test_the_clients_own_proof_does_not_prove_the_server(new_job):
    job = new_job(2, timeout=1)
    with socket.create_server(("127.0.0.1", job.port)) as listening:
        job.start(1)
        client, _ = listening.accept()
        with client:
            theirs = proof.unpack(receive(client, proof.HELLO_BYTES))
            client.sendall(theirs.answer().pack())
            client.sendall(receive(client, proof.PROOF_BYTES))
            # It tells nothing of itself.
            assert is_closed_without_an_answer(client)
    assert "it does not know the secret" in job.errors()[1]


# --- strangers between two ranks -----------------------------------------------------

# Either side's bytes: its hello, its proof, and then a message.
MESSAGE = proof.HELLO_BYTES + proof.PROOF_BYTES
PLACES = {
    "purpose": 9,
    "tls": 10,
    "sender": 15,
    "version": 24,
    "nonce": proof.HELLO_BYTES - 1,
    "proof": proof.HELLO_BYTES,
    "length": MESSAGE + 3,
    "seal": MESSAGE + 10,
    "content": MESSAGE + messages.HEADER_BYTES + 100,
}


class FlipBit:
    """Changes one bit of the server's, or the client's, bytes."""

    def __init__(self, offset: int, of_server: bool):
        self._left = offset
        self._of_server = of_server

    def __call__(self, content: bytes, is_servers: bool) -> bytes:
        if is_servers != self._of_server:
            return content
        at, self._left = self._left, self._left - len(content)
        if not 0 <= at < len(content):
            return content
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_one_changed_bit_is_noticed(new_job):
    jobs = {}
    for case in itertools.product(PLACES, (True, False)):
        place, of_server = case
        job = new_job(2, timeout=2)
        proxy = Proxy(job.port, FlipBit(PLACES[place], of_server))
        job.start(0, "a")
        job.start(1, "b", rendezvous=proxy.address)
        jobs[case] = job, proxy
    for (place, of_server), (job, proxy) in jobs.items():
        print(place, "of the", "server" if of_server else "client")
        ended = job.started.end()
        if isinstance(ended[0], Meeting):
            # The first connection counted as a stranger's, and the rank came again.
            assert PLACES[place] < MESSAGE
            assert len(proxy.of_client) > 2 * proof.HELLO_BYTES + proof.PROOF_BYTES
            assert [len(ended[rank].links) for rank in range(2)] == [2, 2]
        else:
            assert all(isinstance(one, RendezvousError) for one in ended.values())


def test_a_changed_table_is_not_used(new_job):
    def change(content: bytes, is_servers: bool) -> bytes:
        return content.replace(b"127.0.0.1", b"127.6.6.6") if is_servers else content

    job = new_job(2)
    proxy = Proxy(job.port, change)
    job.start(0, "a")
    job.start(1, "b", rendezvous=proxy.address)
    errors = job.errors()
    assert errors[1].endswith("is refused: it was changed on its way")
    assert "rank 1, on" in errors[0] and "ended while the job was start" in errors[0]


@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "tls"])
def test_with_tls_who_listens_in_reads_nothing(new_job, begin_tls, encrypted):
    job = new_job(2, tls=begin_tls if encrypted else None)
    proxy = Proxy(job.port)
    job.start(0, "a secret host")
    job.start(1, "another one", rendezvous=proxy.address)
    job.end()
    # As JSON has it: encrypted bytes may well have the two letters of a short name.
    name = json.dumps(socket.gethostname()).encode()
    for recorded in (proxy.of_client, proxy.of_server):
        assert len(recorded) > MESSAGE + 200
        for text in (b"host_key", b"another one", b"127.0.0.1", name):
            assert (text in recorded[MESSAGE:]) == (not encrypted)


def test_with_tls_a_wrong_secret_is_refused_before(new_job, begin_tls):
    job = new_job(2, timeout=1, tls=begin_tls)
    proxy = Proxy(job.port)
    job.start(0)
    job.start(1, rendezvous=proxy.address, secret=Secret(b"of another job's ranks"))
    errors = job.errors()
    assert "refuses rank 1: it has another secret, or another job's name" in errors[1]
    assert "were refused: they have another secret" in errors[0]
    assert (len(proxy.of_client), len(proxy.of_server)) == (MESSAGE, MESSAGE)


@pytest.mark.parametrize("of_server", [False, True], ids=["client", "server"])
def test_who_changes_that_tls_was_said_gets_nothing(new_job, begin_tls, of_server):
    job = new_job(2, timeout=1, tls=begin_tls)
    proxy = Proxy(job.port, FlipBit(PLACES["tls"], of_server))
    job.start(0)
    job.start(1, rendezvous=proxy.address)
    assert "refuses rank 1: it has another secret" in job.errors()[1]
    assert (len(proxy.of_client), len(proxy.of_server)) == (MESSAGE, MESSAGE)


def test_under_tls_one_changed_bit_is_noticed(new_job, begin_tls):
    jobs = {}
    # In the handshake and in the messages.
    for case in itertools.product((0, 50, 150, 300, 500), (True, False)):
        offset, of_server = case
        job = new_job(2, timeout=5, tls=begin_tls)
        proxy = Proxy(job.port, FlipBit(MESSAGE + offset, of_server))
        job.start(0, "a")
        job.start(1, "b", rendezvous=proxy.address)
        jobs[case] = job, proxy
    refused = 0
    for (offset, of_server), (job, proxy) in jobs.items():
        print(offset, "of the", "server" if of_server else "client")
        ended = job.started.end()
        if isinstance(ended[0], Meeting):
            # The first connection counted as a stranger's, and the rank came again.
            sent = proxy.of_server if of_server else proxy.of_client
            assert len(sent) > 2 * MESSAGE + offset
            assert [len(ended[rank].links) for rank in range(2)] == [2, 2]
        else:
            refused += 1
            assert all(isinstance(one, RendezvousError) for one in ended.values())
            assert any("refused: TLS: " in str(one) for one in ended.values())
    assert refused > 0


@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "tls"])
def test_a_table_that_ends_in_the_middle_is_an_error_on_both(
    new_job, begin_tls, encrypted
):
    job = new_job(2, tls=begin_tls if encrypted else None)
    # The handshake of TLS takes some 200 bytes.
    proxy = Proxy(job.port, server_bytes=MESSAGE + messages.HEADER_BYTES + 250)
    job.start(0, "a")
    job.start(1, "b", rendezvous=proxy.address)
    errors = job.errors()
    assert "rank 0 at" in errors[1] and "ended while the job was starting" in errors[1]
    assert "rank 1, on" in errors[0] and "ended while the job was start" in errors[0]


# --- ranks that know the secret and break the rules ----------------------------------


def error_after(job, told: bytes | dict) -> str:
    """Rank 0's error when a rank 1 sends this after its proof."""
    key = job.secret.key("")
    with job.connect() as rank:
        client = proof.hello(Role.CLIENT, Purpose.RANKS, 1, 0).pack()
        rank.sendall(client)
        server = receive(rank, proof.HELLO_BYTES)
        shared = proof.Handshake(key, client, server)
        rank.sendall(shared.proof(Role.CLIENT))
        assert shared.is_proof(receive(rank, proof.PROOF_BYTES), Role.SERVER)
        sealer = messages.Sealer(shared.session(Role.CLIENT).sends)
        rank.sendall(
            told if isinstance(told, bytes) else sealer.seal(messages.pack(told))
        )
        receive(rank, 1 << 16)
        (error,) = job.errors().values()
    return error


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param(
            struct.pack("!I32s", 2**31, b""),
            "it has 2147483648 bytes, and at most 65536 are taken",
            id="length",
        ),
        pytest.param(
            struct.pack("!I32s", 2, b"") + b"{}", "changed on its way", id="no-seal"
        ),
        pytest.param({}, "'rank' is not a number in 0..", id="empty"),
        pytest.param({"rank": True}, "'rank' is not a number in 0..", id="bool"),
        pytest.param({"rank": "1" * 60000}, "'rank' is not a number", id="text"),
    ],
)
def test_what_a_proven_process_may_not_send_is_an_error(new_job, told, expected):
    job = new_job(2)
    job.start(0)
    job.await_listening()
    error = error_after(job, told)
    assert expected in error
    assert "rank 1" in error
