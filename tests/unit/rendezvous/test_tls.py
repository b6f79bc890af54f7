"""TLS over one connection: what its two ends tell each other."""

import math
import socket

import pytest

from keras_hvd.rendezvous.connection import Stream, UnprovenError
from keras_hvd.rendezvous.event_loop import EventLoop
from keras_hvd.rendezvous.proof import Role

CREDENTIALS = bytes(32), bytes(range(32))


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
    # An end that nobody said is a ConnectionResetError.
    assert server.tls.recv(1) == b""


def test_another_key_is_refused(streams, begin_tls):
    with pytest.raises(UnprovenError, match="TLS: "):
        begin(streams, begin_tls, CREDENTIALS, (bytes(32), bytes(32)))


def test_an_end_that_nobody_said_is_an_error(streams, begin_tls):
    begin(streams, begin_tls, CREDENTIALS, CREDENTIALS)
    client, server = streams
    client.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="it was cut off"):
        server.tls.recv(1)
