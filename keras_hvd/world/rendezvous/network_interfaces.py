"""The IP addresses of this host's network interfaces, by the interfaces' names."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence

from keras_hvd.exceptions import RendezvousError
from keras_hvd.job.system_files import lines_of
from keras_hvd.world.rendezvous import address
from keras_hvd.world.rendezvous.address import Address

_SIOCGIFADDR = 0x8915
# struct ifreq: a name, and a sockaddr_in with the address at its fifth byte.
_IFREQ = struct.Struct("16s4x4s16x")


def addresses(names: Sequence[str]) -> list[str]:
    """The IP addresses of the first of these interfaces that this host has.

    Hosts may have different names for the same network, so some may be missing. Raises
    RendezvousError if none is here, or it has no address.

    Example:

    >>> addresses(["no0", "lo"])[0]
    '127.0.0.1'
    >>> addresses(["no0"])
    Traceback (most recent call last):
    keras_hvd.exceptions.RendezvousError: this host has no network interface 'no0', ...
    """
    return _addresses(first(names))


def first(names: Sequence[str]) -> str:
    """The first of these interfaces that this host has.

    Raises RendezvousError if none is here.

    Example:

    >>> first(["no0", "lo"])
    'lo'
    """
    here = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name in here:
            return name
    raise RendezvousError(
        f"this host has no network interface {' or '.join(map(repr, names))}, as "
        f"KERAS_HVD_NETWORK_INTERFACES asks for: it has {', '.join(here)}"
    )


def sources(names: Sequence[str]) -> list[str]:
    """IP addresses of the interfaces that the user named; none: any.

    Example:

    >>> sources(["lo"])[0], sources([])
    ('127.0.0.1', [])
    """
    return addresses(names) if names else []


def reachable(names: Sequence[str]) -> list[str]:
    """The IP addresses at which other hosts may reach this one, the likeliest first.

    They are those of the interfaces that the user has named, else of all. Raises
    RendezvousError.

    Example:

    >>> reachable(["lo"])[0]
    '127.0.0.1'
    """
    if names:
        return addresses(names)
    here = [name for _, name in socket.if_nameindex()]
    # A host may have interfaces for its containers, which have no way out.
    way_out = _interface_of_default_route()
    here.sort(key=lambda name: name != way_out)
    own = [one for name in here for one in found(name)]
    others = [one for one in own if not ipaddress.ip_address(one).is_loopback]
    return others or own


def reached_as(names: Sequence[str], interfaces: Sequence[str]) -> str:
    """The IP address of this host by which others know it.

    Args:
        names: of this host, as others call it, the best one first.
        interfaces: those that the user has named; none: any.

    Raises RendezvousError.

    Example:

    >>> reached_as(["127.0.0.1"], ["lo"])
    '127.0.0.1'
    """
    own = reachable(interfaces)
    # Behind an address translation it is not this host's, and Debian gives a host's own
    # name an address that no other host reaches.
    for name in names:
        with contextlib.suppress(OSError):
            for seen in address.resolve(Address(name.strip("[]"), 0)):
                if seen.host in own:
                    return seen.host
    return own[0]


def found(name: str) -> list[str]:
    """The IP addresses of an interface, if it has any.

    Example:

    >>> found("lo")[0]
    '127.0.0.1'
    """
    return [*_ipv4(name), *_ipv6(name)]


def name_of(own: str) -> str | None:
    """The interface with an IP address of this host, if there is one.

    Example:

    >>> name_of("127.0.0.1")
    'lo'
    """
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if own in found(name)), None)


def _interface_of_default_route() -> str:
    for line in lines_of("/proc/net/route")[1:]:
        interface, destination = line.split()[:2]
        if int(destination, 16) == 0:
            return interface
    return ""


def _addresses(name: str) -> list[str]:
    if own := found(name):
        return own
    raise RendezvousError(f"the network interface {name!r} has no IP address")


def _ipv4(name: str) -> list[str]:
    request = _IFREQ.pack(name.encode(), b"")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError:
            return []
    return [socket.inet_ntoa(_IFREQ.unpack(answer)[1])]


def _ipv6(name: str) -> list[str]:
    global_ones = []
    # A kernel may have no IPv6.
    for digits, *_, interface in map(str.split, lines_of("/proc/net/if_inet6")):
        own = ipaddress.IPv6Address(int(digits, 16))
        # Link-local addresses need the interface's number as well, which differs by
        # host.
        if interface == name and not own.is_link_local:
            global_ones.append(str(own))
    return global_ones
