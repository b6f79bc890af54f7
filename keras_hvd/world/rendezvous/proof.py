"""Two processes prove to each other that they know the job's secret.

The end that connects is the client. Each message has a fixed size, and nothing else is
read before all of them are right:

    client: hello       who it is, whom it wants to reach, what for, and a random nonce
    server: hello       the same, answered
    client: proof       an HMAC over both hellos, with the job's key
    server: proof       another one

The key comes from the secret and the job's name. The nonces are new each time, so a
recorded message proves nothing later. The two proofs differ, so neither can be sent
back. The client proves first: an end that only connects gets nothing to guess the
secret from.

Messages after the proof have keys of their own, one for each direction: `Session`. So
has TLS, which begins right after the proof if both hellos say so.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from keras_hvd.version import __version__

# The last byte of the magic number is the version of this protocol. The fields after it
# have the same place in all versions of keras_hvd with the same magic number.
_HELLO = struct.Struct("!8sBBBBii64s32s")
_MAGIC = b"KHVDMEE\x01"

HELLO_BYTES = _HELLO.size
PROOF_BYTES = hashlib.sha256().digest_size

REFUSAL = bytes(PROOF_BYTES)
"""The server's message in place of its proof, if the client's is wrong."""


class Purpose(enum.IntEnum):
    """The purpose of a connection. The first three are those of `khvd_link_purpose`."""

    CONTROL = 0
    DATA = 1
    FAILURE = 2
    RANKS = 3  # the ranks of a job meet
    NODES = 4  # the khvdruns of a job meet
    CALL = 5  # a rank speaks with the process that called `run`
    HOSTS = 6  # the khvdrun of a host joins a job
    MEMBERSHIP = 8  # the khvdrun of a host joins the job of a membership service


class Role(enum.IntEnum):
    """The end of a connection that a process has."""

    CLIENT = 1
    SERVER = 2


@dataclass(frozen=True)
class Hello:
    """The facts about a process, and about its peer: their numbers in a job.

    Example:

    >>> mine = hello(Role.CLIENT, Purpose.DATA, sender=3, receiver=1)
    >>> theirs = mine.answer()
    >>> theirs.sender, theirs.receiver, theirs.answers(mine)
    (1, 3, True)
    >>> unpack(theirs.pack()) == theirs
    True
    """

    role: Role
    purpose: Purpose
    sender: int
    receiver: int
    version: str
    nonce: bytes
    tls: bool = False  # whether it goes on with TLS, and with nothing else
    number: int = 0  # which of the connections for this purpose

    def pack(self) -> bytes:
        """The hello in HELLO_BYTES bytes."""
        version = self.version.encode()
        return _HELLO.pack(
            *(_MAGIC, self.role, self.purpose, self.tls, self.number),
            *(self.sender, self.receiver, version, self.nonce),
        )

    def answer(self, tls: bool = False) -> Hello:
        """The server's hello to this one."""
        return hello(
            *(Role.SERVER, self.purpose, self.receiver, self.sender), tls, self.number
        )

    def answers(self, question: Hello) -> bool:
        """Whether this may be the server's answer to a client's hello."""
        return (
            *(self.role, self.purpose, self.number, self.sender, self.receiver),
        ) == (
            *(Role.SERVER, question.purpose, question.number),
            *(question.receiver, question.sender),
        )


def hello(
    role: Role,
    purpose: Purpose,
    sender: int,
    receiver: int,
    tls: bool = False,
    number: int = 0,
) -> Hello:
    """A hello of this process, with a new nonce.

    Example:

    >>> len(hello(Role.CLIENT, Purpose.RANKS, 3, 0).nonce)
    32
    """
    nonce = secrets.token_bytes(32)
    return Hello(role, purpose, sender, receiver, __version__, nonce, tls, number)


def unpack(packed: bytes) -> Hello | None:
    """The hello in HELLO_BYTES bytes, or None if they are something else.

    Example:

    >>> unpack(b"GET / HTTP/1.1".ljust(HELLO_BYTES)) is None
    True
    """
    magic, role, purpose, tls, number, *rest = _HELLO.unpack(packed)
    sender, receiver, version, nonce = rest
    if magic != _MAGIC or tls > 1:
        return None
    try:
        text = version.rstrip(b"\0").decode("ascii")
        names = Role(role), Purpose(purpose)
        return Hello(*names, sender, receiver, text, nonce, tls == 1, number)
    except ValueError:
        return None


@dataclass(frozen=True, repr=False)
class Handshake:
    """The proofs of two processes: that they have the key, over both hellos.

    Example:

    >>> client = hello(Role.CLIENT, Purpose.RANKS, 3, 0)
    >>> shared = Handshake(b"key", client.pack(), client.answer().pack())
    >>> shared.is_proof(shared.proof(Role.CLIENT), Role.CLIENT)
    True
    >>> shared.is_proof(shared.proof(Role.CLIENT), Role.SERVER)
    False
    """

    key: bytes
    client: bytes  # the packed hellos
    server: bytes

    def proof(self, role: Role) -> bytes:
        """The proof of one of the two."""
        return self._digest(b"proof of the " + role.name.encode())

    def is_proof(self, proof: bytes, role: Role) -> bool:
        """Whether this is the proof of one of the two."""
        return hmac.compare_digest(proof, self.proof(role))

    def session(self, role: Role) -> Session:
        """The keys of one of the two, for the messages that follow."""
        keys = {
            each: self._digest(b"messages of the " + each.name.encode())
            for each in Role
        }
        other = Role.SERVER if role == Role.CLIENT else Role.CLIENT
        return Session(keys[role], keys[other])

    def tls_credentials(self) -> tuple[bytes, bytes]:
        """The identity and the key for TLS over this connection."""
        return self._digest(b"identity for TLS"), self._digest(b"key for TLS")

    def _digest(self, label: bytes) -> bytes:
        text = label + b"\0" + self.client + self.server
        return hmac.digest(self.key, text, "sha256")


@dataclass(frozen=True, repr=False)
class Session:
    """The keys for messages that a process sends and receives on one connection."""

    sends: bytes
    receives: bytes
