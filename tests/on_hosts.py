"""Runs a command as a job on several hosts, all of which are this machine.

    python tests/on_hosts.py 2 1 python -m pytest tests/parallel

starts one khvdrun for 2 ranks and one for 1. Each host is a network namespace where
this process may make them (see network.py). Elsewhere, and with --keys, host keys keep
their ranks from sharing memory, and they talk over the loopback interface. With
KERAS_HVD_TLS=1 they use TLS. The exit code is that of the khvdrun that failed first,
whose last output comes again at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import network
from free_port import free_port

# In a network that no other process uses.
_PORT = 29400
_LAST_BYTES = 2000
# The words that run a command on a host, by its number; the address where they meet.
Hosts = tuple[Callable[[int, list[str]], list[str]], str]


@contextlib.contextmanager
def hosts_with_keys() -> Iterator[Hosts]:
    """Hosts that are this machine and its network."""
    yield lambda number, words: words, f"127.0.0.1:{free_port()}"


@contextlib.contextmanager
def hosts_with_networks(count: int, rate: str, delay: float) -> Iterator[Hosts]:
    """Hosts that have networks of their own."""
    with network.connected(count, rate, delay) as hosts:
        rendezvous = f"{hosts[0].address}:{_PORT}"
        yield lambda number, words: hosts[number].command(words), rendezvous


def follow(nodes: list[subprocess.Popen[bytes]]) -> Iterator[tuple[int, bytes]]:
    """Passes their output on; yields each that ends, with the last of its output."""
    last = [b"" for _ in nodes]
    with selectors.DefaultSelector() as selector:
        for number, node in enumerate(nodes):
            selector.register(node.stdout, selectors.EVENT_READ, number)
        while selector.get_map():
            for key, _ in selector.select():
                chunk = os.read(key.fd, 1 << 16)
                sys.stdout.buffer.write(chunk)
                sys.stdout.flush()
                last[key.data] = (last[key.data] + chunk)[-_LAST_BYTES:]
                if not chunk:
                    selector.unregister(key.fileobj)
                    yield key.data, last[key.data]


def run(counts: list[str], command: list[str], hosts: Hosts) -> int:
    """Runs the command with so many ranks on each host; returns an exit code."""
    on_host, rendezvous = hosts
    with tempfile.NamedTemporaryFile("w", prefix="secret") as secret:
        secret.write(secrets.token_hex())
        secret.flush()
        nodes = [
            subprocess.Popen(
                on_host(
                    number,
                    [sys.executable, "-m", "keras_hvd.launch"]
                    + ["--nnodes", str(len(counts)), "--node-rank", str(number)]
                    + ["--rendezvous", rendezvous, "-np", count, *command],
                ),
                env={
                    # The switch of slow networks is a process, which may have no core
                    # for some seconds.
                    "KERAS_HVD_HOST_TIMEOUT_SECONDS": "30",
                    **os.environ,
                    "KERAS_HVD_HOST_KEY": f"host {number}",
                    "KERAS_HVD_TEST_HOSTS": " ".join(counts),
                    "KERAS_HVD_SECRET_FILE": secret.name,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for number, count in enumerate(counts)
        ]
        ends = [(*end, nodes[end[0]].wait()) for end in follow(nodes)]
    failed = [end for end in ends if end[-1]]
    if not failed:
        return 0
    # The other hosts' output about it comes after it, and is long.
    number, last, code = failed[0]
    text = last.decode(errors="replace").rstrip()
    print(f"\nHost {number} failed first, with exit code {code}:\n{text}", flush=True)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(usage="%(prog)s [options] COUNT... COMMAND")
    parser.add_argument("--keys", action="store_true", help="no networks of their own")
    parser.add_argument("--rate", default="", help="of a network cable, as 1gbit")
    parser.add_argument("--delay", type=float, default=0, help="in milliseconds")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    count = next(i for i, word in enumerate(options.words) if not word.isdecimal())
    why_not = "" if options.keys else network.unavailable()
    if why_not:
        print(f"These hosts have no networks of their own: {why_not}", flush=True)
    if options.keys or why_not:
        hosts = hosts_with_keys()
    else:
        hosts = hosts_with_networks(count, options.rate, options.delay / 1000)
    with hosts as made:
        return run(options.words[:count], options.words[count:], made)


if __name__ == "__main__":
    sys.exit(main())
