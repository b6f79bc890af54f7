"""Looks at the network between the hosts of a job, and judges its speed."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from keras_hvd.exceptions import RendezvousError
from keras_hvd.launch.diagnosis import probes
from keras_hvd.launch.diagnosis.findings import Finding, warning
from keras_hvd.world.rendezvous import address as addresses
from keras_hvd.world.rendezvous import network_interfaces
from keras_hvd.world.rendezvous.nodes import Node

_INTERFACES = Path("/sys/class/net")
_MEBIBYTE = 1 << 20

# Hosts of one building are a tenth of a millisecond apart, including the devices
# between them.
_SLOW_TRIP = 2e-3
# The share of an interface's speed that TCP reaches without effort.
_USUAL_SHARE = 0.5


def interface(node: Node) -> Finding:
    """Finds the interface that the job uses, and whether there is a faster one."""
    used = _interface_of(node)
    speed = _speed(used)
    figure = f"{used}, {_bits(speed) if speed else 'of unknown speed'}"
    names = [name for _, name in socket.if_nameindex()]
    speeds = {name: _speed(name) for name in names if _leads_out(name)}
    fastest = max(speeds, key=lambda name: speeds[name], default=used)
    if speed == 0 or speeds.get(fastest, 0) <= speed:
        return Finding("interface", figure)
    return warning(
        *("interface", figure),
        f"{fastest} has {_bits(speeds[fastest])}: if it reaches the other hosts too, "
        f"use it with --network-interfaces {fastest}",
    )


def trip(seconds: float) -> Finding:
    """Judges the time of a small allreduce, a way to node 0 and back."""
    figure = f"{probes.duration(seconds)} for 4 bytes to the other hosts and back"
    if seconds <= _SLOW_TRIP:
        return Finding("network trip", figure)
    return warning(
        *("network trip", figure),
        "hosts that are far from each other, or busy, wait that long in each step: use "
        "hosts of one place (a placement group), and wired networks",
    )


def rate(allreduce: Mapping[int, float], node: Node) -> list[Finding]:
    """Judges each host's sending rate, from the seconds of allreduces by bytes."""
    try:
        speed = _speed(_interface_of(node))
    except (OSError, RendezvousError):  # reported by `interface`
        speed = 0
    findings = []
    for size, seconds in allreduce.items():
        if size < _MEBIBYTE:
            continue
        # Each host reduces a part, and sends the other parts and its result.
        sent = 2 * size * (node.count - 1) / node.count
        name = f"network {size // _MEBIBYTE} MiB"
        bits = 8 * sent / seconds
        figure = f"{probes.duration(seconds)}: each host sends {_bits(bits)}"
        if speed == 0 or bits >= _USUAL_SHARE * speed or size < max(allreduce):
            findings.append(Finding(name, figure))
            continue
        findings.append(
            warning(
                *(name, f"{figure} of the interface's {_bits(speed)}"),
                "other traffic, a slower switch or a busy host is in the way: compare "
                "with iperf3 between the hosts; try several connections "
                "(KERAS_HVD_DATA_CONNECTIONS=4) and larger frames (ip link set mtu "
                "9000), both on all hosts",
            )
        )
    return findings


def _own_address(node: Node) -> str:
    """The address at which other hosts find this one."""
    if node.interfaces:
        return network_interfaces.addresses(node.interfaces)[0]
    target = addresses.resolve(addresses.parse(node.rendezvous))[0]
    with socket.socket(target.family, socket.SOCK_DGRAM) as any_socket:
        # Sends nothing; the system only chooses a way.
        any_socket.connect(target)
        return str(any_socket.getsockname()[0])


def _interface_of(node: Node) -> str:
    own = _own_address(node)
    name = network_interfaces.name_of(own)
    if name is None:
        raise OSError(f"no network interface has the address {own}")
    return name


def _leads_out(name: str) -> bool:
    """Whether an interface has a device and an address: containers' have no device."""
    is_device = (_INTERFACES / name / "device").exists()
    return is_device and bool(network_interfaces.found(name))


def _speed(name: str) -> int:
    """An interface's speed in bits per second; 0 if it is down or does not tell."""
    try:
        megabits = int((_INTERFACES / name / "speed").read_text())
    except (OSError, ValueError):
        return 0
    return max(0, megabits) * 10**6


def _bits(per_second: float) -> str:
    """Formats a rate.

    Example:

    >>> _bits(25e9), _bits(94.9e6)
    ('25 Gbit/s', '94.9 Mbit/s')
    """
    if per_second >= 1e9:
        return f"{per_second / 1e9:.3g} Gbit/s"
    return f"{per_second / 1e6:.3g} Mbit/s"
