"""Ports for servers that start later."""

import contextlib
import random
import socket

# Below those that Linux gives to whoever asks for any, so nobody gets one meanwhile.
# Those from 16,384 on are for jobs of Slurm, and for tests that list their ports.
_PORTS = range(10_240, 16_384)
_random = random.SystemRandom()


def free_port() -> int:
    """A port of this host without a listener."""
    while True:
        port = _random.choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
