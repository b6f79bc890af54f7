"""The bytes that prove a secret: their content, and uses that are refused."""

import dataclasses

import pytest

from keras_hvd.world.rendezvous import messages, proof
from keras_hvd.world.rendezvous.messages import (
    HEADER_BYTES,
    MessageError,
    Opener,
    Sealer,
    pack,
)
from keras_hvd.world.rendezvous.proof import Handshake, Purpose, Role
from keras_hvd.world.rendezvous.secret import Secret

SECRET = Secret(b"only these tests know")
CLIENT = proof.hello(Role.CLIENT, Purpose.DATA, sender=3, receiver=1)
SERVER = CLIENT.answer()


def handshake(client=CLIENT, server=SERVER, key=None) -> Handshake:
    key = SECRET.key("job") if key is None else key
    return Handshake(key, client.pack(), server.pack())


@pytest.mark.parametrize("role", Role)
def test_both_ends_make_the_same_proofs(role):
    assert handshake().is_proof(handshake().proof(role), role)


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize(
    "change",
    [
        {"purpose": Purpose.CONTROL},
        {"sender": 2},
        {"receiver": 0},
        {"version": "9.9.9"},
        {"nonce": bytes(32)},
        {"tls": True},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("role", Role)
def test_a_proof_is_of_all_that_both_have_said(role, side, change):
    said = {"client": CLIENT, "server": SERVER}
    said[side] = dataclasses.replace(said[side], **change)
    assert not handshake().is_proof(handshake(**said).proof(role), role)


def test_a_proof_is_of_one_secret_and_one_job():
    keys = [
        SECRET.key("job"),
        SECRET.key("another"),
        Secret(b"only others know of it").key("job"),
    ]
    assert len({handshake(key=key).proof(Role.CLIENT) for key in keys}) == 3


def test_each_side_proves_otherwise():
    assert not handshake().is_proof(handshake().proof(Role.CLIENT), Role.SERVER)
    assert not handshake().is_proof(handshake().proof(Role.SERVER), Role.CLIENT)


def test_tls_has_credentials_of_its_own_for_each_connection():
    other = dataclasses.replace(SERVER, nonce=bytes(32))
    made = [*handshake().tls_credentials(), *handshake(server=other).tls_credentials()]
    made += [handshake().proof(role) for role in Role]
    made += vars(handshake().session(Role.CLIENT)).values()
    assert len({*made}) == len(made) == 8
    assert handshake().tls_credentials() == handshake().tls_credentials()


def test_nonces_are_new_each_time():
    made = {proof.hello(Role.CLIENT, Purpose.DATA, 3, 1).nonce for _ in range(100)}
    assert len(made) == 100


@pytest.mark.parametrize(
    "change",
    [
        {"role": Role.CLIENT},
        {"purpose": Purpose.CONTROL},
        {"sender": 0},
        {"receiver": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_answer_is_to_one_question(change):
    assert SERVER.answers(CLIENT)
    assert not dataclasses.replace(SERVER, **change).answers(CLIENT)


@pytest.mark.parametrize("at", [0, 7, 8, 9, 10])
def test_other_bytes_are_no_hello(at):
    packed = bytearray(CLIENT.pack())
    packed[at] ^= 0x40
    assert proof.unpack(bytes(packed)) is None


# --- messages ------------------------------------------------------------------------


def opened(opener: Opener, sealed: bytes) -> dict:
    return opener.open(sealed[:HEADER_BYTES], sealed[HEADER_BYTES:])


def test_messages_arrive_in_their_order():
    keys = handshake().session(Role.CLIENT), handshake().session(Role.SERVER)
    sealer, opener = Sealer(keys[0].sends), Opener(keys[1].receives)
    assert [opened(opener, sealer.seal(pack({"n": n}))) for n in range(3)] == [
        {"n": n} for n in range(3)
    ]


def test_messages_left_out_repeated_or_swapped_are_noticed():
    sealer = Sealer(b"key")
    first, second = sealer.seal(pack({})), sealer.seal(pack({}))
    with pytest.raises(MessageError, match="changed"):
        opened(Opener(b"key"), second)
    opener = Opener(b"key")
    opened(opener, first)
    with pytest.raises(MessageError, match="changed"):
        opened(opener, first)


def test_a_message_does_not_come_back():
    keys = handshake().session(Role.CLIENT)
    with pytest.raises(MessageError, match="changed"):
        opened(Opener(keys.receives), Sealer(keys.sends).seal(pack({})))


def test_keys_of_messages_are_of_one_connection():
    other = dataclasses.replace(SERVER, nonce=bytes(32))
    sealed = Sealer(handshake(server=other).session(Role.CLIENT).sends).seal(pack({}))
    with pytest.raises(MessageError, match="changed"):
        opened(Opener(handshake().session(Role.SERVER).receives), sealed)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[1]", "it is not a JSON object"),
        (b"{", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
    ],
    ids=["list", "half", "no-text", "deep"],
)
def test_what_is_sealed_may_still_be_malformed(content, expected):
    seal = messages._seal(b"key", 0, content)
    header = messages._HEADER.pack(len(content), seal)
    with pytest.raises(MessageError, match=expected):
        Opener(b"key").open(header, content)
