"""HOST:PORT, right and wrong."""

import pytest

from keras_hvd.world.rendezvous.address import Address, parse


@pytest.mark.parametrize(
    "text", ["node0:29400", "10.0.0.1:1", "[::1]:65535", "[fd00::2]:29400", "a.b-c:80"]
)
def test_an_address_is_written_as_it_was_read(text):
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "node0", "node0:", ":29400", "node0:0", "node0:65536", "node0:-1"),
        *("node0:x", "node0:٣", "::1:29400", "[]:29400", "[node0]:29400", "[::1]"),
    ],
)
def test_names_what_is_no_address(text):
    with pytest.raises(ValueError, match="is not HOST:PORT, such as"):
        parse(text)


@pytest.mark.parametrize("text", ["0.0.0.0:29400", "[::]:29400"])
def test_any_address_is_none_to_connect_to(text):
    with pytest.raises(ValueError, match="names no host"):
        parse(text)


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False)]
)
def test_knows_what_only_its_own_host_reaches(host, expected):
    assert Address(host, 1).is_loopback == expected
