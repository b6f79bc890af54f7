"""Messages after the proof, with a length and an HMAC in front: most are JSON objects.

Each message of a direction has a number, which the HMAC covers. So a message that was
changed, left out, repeated or swapped with another one is noticed.
"""

from __future__ import annotations

import hmac
import json
import struct
from typing import Any

# A length, then an HMAC.
_HEADER = struct.Struct("!I32s")
_COVERED = struct.Struct("!QI")

HEADER_BYTES = _HEADER.size


class MessageError(Exception):
    """A message of a proven process is too long, changed or malformed."""


def pack(message: dict[str, Any]) -> bytes:
    """A message's content, which can be sealed for many receivers.

    Example:

    >>> pack({"rank": 1})
    b'{"rank":1}'
    """
    return json.dumps(message, separators=(",", ":")).encode()


class Sealer:
    """Makes messages of one direction of a connection.

    Example:

    >>> sealer, opener = Sealer(b"key"), Opener(b"key")
    >>> sealed = sealer.seal(pack({"rank": 1}))
    >>> opener.length(sealed[:HEADER_BYTES], limit=100)
    10
    >>> opener.open(sealed[:HEADER_BYTES], sealed[HEADER_BYTES:])
    {'rank': 1}
    """

    def __init__(self, key: bytes):
        self._key = key
        self._number = 0

    def seal(self, content: bytes) -> bytes:
        """A packed message with its header."""
        seal = _seal(self._key, self._number, content)
        self._number += 1
        return _HEADER.pack(len(content), seal) + content


class Opener:
    """Checks and reads messages of one direction of a connection.

    Example:

    >>> sealed = Sealer(b"key").seal(pack({"rank": 1}))
    >>> Opener(b"key").length(sealed[:HEADER_BYTES], limit=9)
    Traceback (most recent call last):
    keras_hvd.world.rendezvous.messages.MessageError: it has 10 bytes, and at most 9 ...
    >>> Opener(b"key").open(sealed[:HEADER_BYTES], b'{"rank":2}')
    Traceback (most recent call last):
    keras_hvd.world.rendezvous.messages.MessageError: it was changed on its way
    """

    def __init__(self, key: bytes):
        self._key = key
        self._number = 0

    def length(self, header: bytes, limit: int) -> int:
        """The number of bytes that follow a header."""
        length, _ = _HEADER.unpack(header)
        if length > limit:
            raise MessageError(f"it has {length} bytes, and at most {limit} are taken")
        return length

    def check(self, header: bytes, content: bytes) -> None:
        """Raises MessageError unless the content has this seal."""
        _, seal = _HEADER.unpack(header)
        if not hmac.compare_digest(seal, _seal(self._key, self._number, content)):
            raise MessageError("it was changed on its way")
        self._number += 1

    def open(self, header: bytes, content: bytes) -> dict[str, Any]:
        """The message in the content after a header."""
        self.check(header, content)
        try:
            message = json.loads(content)
        except (ValueError, RecursionError):
            raise MessageError("it is not JSON") from None
        if not isinstance(message, dict):
            raise MessageError("it is not a JSON object")
        return message


def _seal(key: bytes, number: int, content: bytes) -> bytes:
    covered = _COVERED.pack(number, len(content)) + content
    return hmac.digest(key, covered, "sha256")
