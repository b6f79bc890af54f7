"""Addresses as HOST:PORT, with IPv6 addresses in brackets."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple


class Address(NamedTuple):
    """A host's name or IP address, and a TCP port.

    Example:

    >>> str(Address("fd00::2", 29400))
    '[fd00::2]:29400'
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """The family of an IP address."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def is_loopback(self) -> bool:
        """Whether an IP address is reached from its own host only."""
        return ipaddress.ip_address(self.host).is_loopback


def parse(text: str) -> Address:
    """Reads HOST:PORT. Raises ValueError with the reason.

    Example:

    >>> parse("node0.cluster:29400")
    Address(host='node0.cluster', port=29400)
    >>> parse("[fd00::2]:29400")
    Address(host='fd00::2', port=29400)
    >>> parse("node0")
    Traceback (most recent call last):
    ValueError: 'node0' is not HOST:PORT, such as node0:29400 or [fd00::2]:29400
    """
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535
    in_brackets = host.startswith("[") and host.endswith("]")
    if in_brackets:
        host = host[1:-1]
    if not host or not is_port or (":" in host) != in_brackets:
        raise ValueError(
            f"{text!r} is not HOST:PORT, such as node0:29400 or [fd00::2]:29400"
        )
    if _is_unspecified(host):
        raise ValueError(f"{text!r} names no host: others could not connect to it")
    return Address(host, int(port))


def resolve(address: Address) -> list[Address]:
    """The IP addresses of a host, in the order to try. Raises OSError.

    Example:

    >>> resolve(Address("127.0.0.1", 29400))
    [Address(host='127.0.0.1', port=29400)]
    """
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    # A dict keeps the order, and one of each.
    return [*dict.fromkeys(Address(str(each[4][0]), address.port) for each in found)]


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
