"""TLS between hosts, for the rendezvous and then for the engine.

The engine's library has it, because Python's `ssl` knows pre-shared keys only from 3.13
on, and because the engine goes on with the same sessions.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import socket
from collections.abc import Mapping

from keras_hvd import exceptions
from keras_hvd.job import native, settings
from keras_hvd.world.rendezvous.connection import BeginTls, UnprovenError
from keras_hvd.world.rendezvous.event_loop import READ, WRITE
from keras_hvd.world.rendezvous.messages import MessageError
from keras_hvd.world.rendezvous.proof import Role

_MOST_TEXT = 512

# The values of c_api.h.
_WANTS_READ = -1
_WANTS_WRITE = -2
_REFUSED = -3
_LOST = -4


class Session:
    """TLS over one connected socket: see `connection.Tls`.

    Its functions do not wait. One thread at a time may use it.
    """

    def __init__(
        self,
        library: bytes,
        connected: socket.socket,
        role: Role,
        identity: bytes,
        key: bytes,
    ):
        is_client = role == Role.CLIENT
        self._address = native.engine().khvd_tls_open(
            library, connected.fileno(), is_client, identity, key
        )
        if not self._address:
            raise exceptions.LibraryError(f"TLS cannot begin: {_last_error()}")

    def handshake(self) -> int:
        """Continues the handshake; returns what to wait for, or 0 at its end.

        Raises UnprovenError if the other end does not have the key, or OSError.
        """
        outcome = native.engine().khvd_tls_handshake(self._address)
        if outcome == _REFUSED:
            raise UnprovenError(_last_error())
        _require_connected(outcome, _LOST)
        return {_WANTS_READ: READ, _WANTS_WRITE: WRITE}.get(outcome, 0)

    def send(self, content: memoryview, /) -> int:
        """Sends a part. After a BlockingIOError the same bytes must come first."""
        outcome = native.engine().khvd_tls_write(
            self._address, bytes(content), len(content)
        )
        _require_connected(outcome, _REFUSED, _LOST)
        return _moved(outcome)

    def recv(self, size: int, /) -> bytes:
        """Receives at most `size` bytes; none at the end.

        Raises MessageError if they were changed, BlockingIOError, or another OSError.
        """
        content = ctypes.create_string_buffer(size)
        outcome = native.engine().khvd_tls_read(self._address, content, size)
        if outcome == _REFUSED:
            raise MessageError(_last_error())
        _require_connected(outcome, _LOST)
        return content.raw[: _moved(outcome)]

    def close(self) -> None:
        """Ends TLS, and leaves the socket open. A second call does nothing."""
        if self._address is not None:
            native.engine().khvd_tls_close(self.detach())

    def detach(self) -> int:
        """Gives the address of the TLS session to the caller, for the engine."""
        address, self._address = self._address, None
        return address


def library(name: bytes) -> str:
    """The OpenSSL in use, for people; `name` is a path, a name, or "".

    Raises LibraryError if there is none that can be used.
    """
    text = ctypes.create_string_buffer(_MOST_TEXT)
    if native.engine().khvd_find_tls(name, text, _MOST_TEXT) != 0:
        raise exceptions.LibraryError(_last_error())
    return text.value.decode(errors="replace")


def chosen(variables: Mapping[str, str]) -> BeginTls | None:
    """TLS for connections to other hosts, or None if the user does not want it.

    Raises LibraryError if the user wants it and there is no OpenSSL for it, or
    ValueError if a variable is malformed.

    Example:

    >>> chosen({}) is None
    True
    """
    if not settings.tls(variables):
        return None
    name = settings.ssl_library(variables)
    try:
        library(name)
    except exceptions.LibraryError as error:
        text = f"KERAS_HVD_TLS=1 (khvdrun --tls) cannot be followed here: {error}"
        raise exceptions.LibraryError(text) from None
    return functools.partial(Session, name)


def _require_connected(outcome: int, *failures: int) -> None:
    if outcome in failures:
        raise ConnectionResetError(errno.ECONNRESET, _last_error())


def _moved(outcome: int) -> int:
    if outcome < 0:
        raise BlockingIOError
    return outcome


def _last_error() -> str:
    return native.engine().khvd_last_error().decode(errors="replace")
