"""Forwards frames between network interfaces, each after a delay.

    python slow_switch.py SECONDS INTERFACE...

Linux can delay packets with `netem`, which not every kernel has. With 0 seconds this
only prepares the interfaces: their packets must not be larger than a frame, nor leave
their checksums to hardware.
"""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import fcntl
import selectors
import socket
import struct
import sys
import time

_SIOCETHTOOL = 0x8946
_ETH_P_ALL = 3
_PACKET_OUTGOING = 4
_LARGEST_FRAME = 1 << 16
_BUFFER_BYTES = 16 << 20
# ETHTOOL_SRXCSUM, STXCSUM, SSG, STSO, SGSO and SGRO.
_OFFLOADS = (0x15, 0x17, 0x19, 0x1F, 0x24, 0x2C)
_PR_SET_TIMERSLACK = 29

# The time to send it on, the port where it came in, and the frame.
Held = collections.deque[tuple[float, socket.socket, bytes]]


def turn_off_offloads(interface: str) -> None:
    """Makes the interface send frames as they would be on a wire."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for offload in _OFFLOADS:
            value = array.array("I", [offload, 0])
            address, _ = value.buffer_info()
            request = struct.pack("16sP16x", interface.encode(), address)
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


def forward(delay: float, interfaces: list[str]) -> None:
    """Forwards for ever."""
    # Else it would be up to 50 us late each time.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    # Of all selectors only this one waits for less than a millisecond.
    selector = selectors.SelectSelector()
    ports = [opened(interface) for interface in interfaces]
    for port in ports:
        selector.register(port, selectors.EVENT_READ)
    print("forwarding", flush=True)
    places: dict[bytes, socket.socket] = {}
    # All are equally late, so the first frame leaves first.
    held: Held = collections.deque()
    while True:
        wait = max(0, held[0][0] - time.monotonic()) if held else None
        for key, _ in selector.select(wait):
            take(key.fileobj, delay, held, places)
        while held and held[0][0] <= time.monotonic():
            _, came_by, frame = held.popleft()
            known = places.get(frame[:6])
            for port in [known] if known else ports:
                # A switch drops frames for which its buffer has no room, and frames to
                # a cable that is out.
                with contextlib.suppress(OSError):
                    if port is not came_by:
                        port.send(frame)


def opened(interface: str) -> socket.socket:
    """All frames of an interface."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    for direction in socket.SO_RCVBUF, socket.SO_SNDBUF:
        port.setsockopt(socket.SOL_SOCKET, direction, _BUFFER_BYTES)
    port.bind((interface, 0))
    port.setblocking(False)
    return port


def take(
    port: socket.socket, delay: float, held: Held, places: dict[bytes, socket.socket]
) -> None:
    """Takes in the frames that have come, and notes the port of each sender."""
    while True:
        try:
            frame, address = port.recvfrom(_LARGEST_FRAME)
        except OSError:
            return
        if address[2] == _PACKET_OUTGOING:
            continue
        places[frame[6:12]] = port
        held.append((time.monotonic() + delay, port, frame))


if __name__ == "__main__":
    for each in sys.argv[2:]:
        turn_off_offloads(each)
    if float(sys.argv[1]):
        forward(float(sys.argv[1]), sys.argv[2:])
