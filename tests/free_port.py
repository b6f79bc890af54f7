"""Ports for servers that start later."""

import contextlib
import random
import socket

# Below those that Linux gives to whoever asks for any, so nobody gets one meanwhile.
# Those from 16,384 on are for jobs of Slurm, and for tests that list their ports.
_PORTS = range(10_240, 16_384)
_random = random.SystemRandom()


def free_port(address: str = "") -> int:
    """A port without a listener, at an address of this host or at all."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        place = address, _random.choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server(place, family=family):
            return place[1]
