"""TLS over one connection: the messages of its two ends."""

import contextlib
import math
import socket
import ssl
import threading

import pytest

from keras_hvd.world.rendezvous.connection import Stream, UnprovenError
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.proof import Role

CREDENTIALS = bytes(32), bytes(range(32))
# A self-signed one, for this file alone.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgOAqzsqfkNO2R5Xed
d+jBP0Iz2zAZPeoYgtPbx93pV/WhRANCAARX9kSrgrkowfHUVdlCAfm90TOR+E5I
usSz/a+fio/tSWZN2M1mgv9Brvfo95OMpCjUmM0cUVaqsddvrtlDH0g2
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBfTCCASOgAwIBAgIUQNXKDAGhQWTuYMlBBvSes4vUV/QwCgYIKoZIzj0EAwIw
EzERMA8GA1UEAwwIaW50cnVkZXIwIBcNMjYxMTIzMTkxMTMxWhgPMjEyNjEwMzAx
OTExMzFaMBMxETAPBgNVBAMMCGludHJ1ZGVyMFkwEwYHKoZIzj0CAQYIKoZIzj0D
AQcDQgAEV/ZEq4K5KMHx1FXZQgH5vdEzkfhOSLrEs/2vn4qP7UlmTdjNZoL/Qa73
6PeTjKQo1JjNHFFWqrHXb67ZQx9INqNTMFEwHQYDVR0OBBYEFGUL7y2rznCLnPWH
+huP67mR4TUnMB8GA1UdIwQYMBaAFGUL7y2rznCLnPWH+huP67mR4TUnMA8GA1Ud
EwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDSAAwRQIgBXKCE9jundGNIzCHfxXPb9TC
43+hQ2wIGKUjjPypkfwCIQDTy23b2ql/JbTeccrDYUTQSzgZwRKrh378vEIVwnt1
FQ==
-----END CERTIFICATE-----
"""


@pytest.fixture
def streams():
    """Two connected streams, in the clear so far."""
    made = [Stream(one, math.inf) for one in socket.socketpair()]
    yield made
    for each in made:
        each.close()


def begin(streams, begin_tls, of_client, of_server) -> None:
    client, server = streams

    async def begin_both():
        loop.start(client.begin_tls(begin_tls, Role.CLIENT, of_client))
        await server.begin_tls(begin_tls, Role.SERVER, of_server)

    loop = EventLoop()
    loop.run(begin_both())


def test_bytes_pass_and_the_end_is_said(streams, begin_tls):
    begin(streams, begin_tls, CREDENTIALS, CREDENTIALS)
    client, server = streams
    EventLoop().run(client.send(b"to the server"))
    assert EventLoop().run(server.receive(13)) == b"to the server"
    with pytest.raises(BlockingIOError):
        server.tls.recv(1)
    client.tls.close()
    assert server.tls.recv(1) == b""


def test_a_stream_ends_its_tls(streams, begin_tls):
    begin(streams, begin_tls, CREDENTIALS, CREDENTIALS)
    client, server = streams
    client.close()
    # An end without notice is a ConnectionResetError.
    assert server.tls.recv(1) == b""


def test_another_key_is_refused(streams, begin_tls):
    with pytest.raises(UnprovenError, match="TLS: "):
        begin(streams, begin_tls, CREDENTIALS, (bytes(32), bytes(32)))


def test_a_certificate_is_no_key(streams, begin_tls, tmp_path):
    (tmp_path / "certificate").write_text(CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate")
    client, server = streams
    server.socket.setblocking(True)

    def intrude():
        # Its reaction to the end does not matter.
        with contextlib.suppress(OSError):
            context.wrap_socket(server.socket.dup(), server_side=True).close()

    intruder = threading.Thread(target=intrude)
    intruder.start()
    with pytest.raises(UnprovenError, match="TLS: "):
        EventLoop().run(client.begin_tls(begin_tls, Role.CLIENT, CREDENTIALS))
    client.socket.shutdown(socket.SHUT_RDWR)
    intruder.join()


def test_an_end_that_nobody_said_is_an_error(streams, begin_tls):
    begin(streams, begin_tls, CREDENTIALS, CREDENTIALS)
    client, server = streams
    client.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="it was cut off"):
        server.tls.recv(1)
