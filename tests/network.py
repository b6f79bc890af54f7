"""Hosts that are network namespaces of this machine, joined by a switch.

Each host has a network, a name and mounts of its own, one address, and a cable to the
switch that can be slow, far or unplugged. All of it ends with the process that made it,
however that ends. Only root can make them: `unavailable` says why not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_SWITCH_WITH_DELAY = Path(__file__).resolve().with_name("slow_switch.py")
_SSHD = Path("/usr/sbin/sshd")
# The queue of a cable before it drops packets, as switches have one.
_BUFFER = "50ms"
# In /proc/net/tcp.
_STATES = {"connected": "01", "listening": "0A"}
# Large frames, so that the switch with a delay keeps up with a gigabit.
_LARGE_FRAME = "9000"


class Host:
    """One of the hosts.

    Args:
        number: from 0.
    """

    def __init__(self, number: int):
        self.name = f"host{number}"
        self.address = f"10.87.0.{number + 1}"
        # Keeps the namespaces as long as its input stays open.
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c"]
            + [f"hostname {self.name} && mount -t tmpfs none /dev/shm && echo && cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if not self._keeper.stdout.readline():
            _, error = self._keeper.communicate()
            raise RuntimeError(error.strip())

    @property
    def pid(self) -> int:
        """A process in the host's namespaces."""
        return self._keeper.pid

    def command(self, words: Sequence[str | Path]) -> list[str]:
        """The command line that runs a command on this host."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount"]
        # Relative paths mean the same there.
        return [*enter, f"--wd={Path.cwd()}", *map(str, words)]

    def run(self, *words: str) -> None:
        """Runs a command on this host, which must succeed."""
        _run(self.command(words))

    def unplug(self) -> None:
        """Pulls the cable."""
        self.run("ip", "link", "set", "cable", "down")

    def plug_in(self) -> None:
        """Puts the cable back."""
        self.run("ip", "link", "set", "cable", "up")

    def close(self) -> None:
        """Gives it up; it goes with its last process."""
        self._keeper.stdin.close()
        self._keeper.wait()
        self._keeper.stdout.close()
        self._keeper.stderr.close()


@contextlib.contextmanager
def connected(hosts: int, rate: str = "", delay: float = 0) -> Iterator[list[Host]]:
    """Hosts joined by a switch, within the context.

    Args:
        hosts: how many.
        rate: of each cable in each direction, as "1gbit"; "": no limit.
        delay: from host to host, in seconds.

    Yields:
        The hosts.
    """
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(contextlib.closing(Host(254)))
        made = []
        for number in range(hosts):
            host = stack.enter_context(contextlib.closing(Host(number)))
            _connect(
                host, switch, f"port{number}", rate, _LARGE_FRAME if delay else "1500"
            )
            made.append(host)
        ports = [f"port{number}" for number in range(hosts)]
        if delay:
            stack.enter_context(_slow_switch(switch, ports, delay, made))
        else:
            switch.run("ip", "link", "add", "bridge", "type", "bridge")
            switch.run("ip", "link", "set", "bridge", "up")
            for port in ports:
                switch.run("ip", "link", "set", port, "master", "bridge")
        yield made


def join(*hosts: Host) -> list[str]:
    """Lays one more cable between two hosts, a network of its own.

    Returns:
        Their addresses there.
    """
    _lay("direct", hosts[0], "direct", hosts[1])
    addresses = [f"10.88.0.{number}" for number in (1, 2)]
    for host, address in zip(hosts, addresses, strict=True):
        host.run("ip", "address", "add", f"{address}/24", "dev", "direct")
        host.run("ip", "link", "set", "direct", "up")
    return addresses


def addresses_in_use(state: str, process: int | str = "self") -> set[str]:
    """The addresses of TCP sockets on a process's host.

    Args:
        state: "listening", or "connected": then those of both ends.
        process: by its number.

    Returns:
        IP addresses; those of IPv6 as the kernel writes them.
    """
    found: set[str] = set()
    for family in "tcp", "tcp6":
        lines = Path(f"/proc/{process}/net/{family}").read_text().splitlines()[1:]
        for _, local, peer, its_state, *_ in map(str.split, lines):
            if its_state == _STATES[state]:
                found |= {local} if state == "listening" else {local, peer}
    return {_readable(end.partition(":")[0]) for end in found}


def _readable(address: str) -> str:
    return (
        socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address
    )


def agent(hosts: Sequence[Host], path: Path) -> Path:
    """Writes a script that runs a command on a host, as ssh does; returns its path."""
    lines = ["#!/bin/sh", "while [ $# -gt 1 ]; do case $1 in"]
    for host in hosts:
        enter = " ".join(host.command(["sh", "-c"]))
        lines.append(f'{host.address}) shift; exec {enter} "$*" ;;')
    path.write_text("\n".join([*lines, "*) shift ;;", "esac done", ""]))
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def ssh(hosts: Sequence[Host], folder: Path) -> Iterator[dict[str, str]]:
    """Real ssh to all hosts, within the context.

    Args:
        hosts: the hosts, each of which gets a server.
        folder: for keys and settings.

    Yields:
        The variables with which `ssh` is found.
    """
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in "host", "user":
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(key, check=True)
    own = {
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "StrictModes": "no",
        "PidFile": "none",
    }
    (folder / "sshd").write_text("".join(f"{k} {v}\n" for k, v in own.items()))
    theirs = {
        "IdentityFile": folder / "user",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
    }
    (folder / "config").write_text("".join(f"{k} {v}\n" for k, v in theirs.items()))
    (folder / "bin").mkdir()
    program = folder / "bin" / "ssh"
    program.write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n'
    )
    program.chmod(0o755)
    servers = [
        subprocess.Popen(host.command([_SSHD, "-D", "-f", folder / "sshd"]))
        for host in hosts
    ]
    try:
        for host, server in zip(hosts, servers, strict=True):
            while ":0016 " not in Path(f"/proc/{host.pid}/net/tcp").read_text():
                assert server.poll() is None
        yield {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    finally:
        for each in servers:
            each.kill()
            each.wait()


def has_ssh() -> bool:
    """Whether there can be ssh to these hosts."""
    return _SSHD.exists()


def _connect(host: Host, switch: Host, port: str, rate: str, frame: str) -> None:
    _lay("cable", host, port, switch)
    host.run("ip", "address", "add", f"{host.address}/24", "dev", "cable")
    host.run("ip", "link", "set", "lo", "up")
    for on, device in (host, "cable"), (switch, port):
        on.run("ip", "link", "set", device, "mtu", frame, "up")
        if rate:
            on.run(
                *("tc", "qdisc", "add", "dev", device, "root", "tbf"),
                *("rate", rate, "burst", "128kb", "latency", _BUFFER),
            )


def _lay(end: str, host: Host, other_end: str, other: Host) -> None:
    """Makes a cable between two hosts, of which each has an end as a device."""
    _run(
        ["ip", "link", "add", end, "netns", str(host.pid), "type", "veth"]
        + ["peer", "name", other_end, "netns", str(other.pid)]
    )


def _run(command: list[str]) -> None:
    """Runs a command, which must succeed; the error has its output."""
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def _slow_switch(
    switch: Host, ports: list[str], delay: float, hosts: list[Host]
) -> Iterator[None]:
    program = [sys.executable, _SWITCH_WITH_DELAY]
    for host in hosts:
        host.run(*map(str, program), "0", "cable")
    running = subprocess.Popen(
        switch.command([*program, str(delay), *ports]), stdout=subprocess.PIPE
    )
    try:
        running.stdout.readline()
        yield
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


def unavailable() -> str:
    """Why there can be no such hosts here; "" if there can."""
    try:
        with connected(2, "1gbit"):
            return ""
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    except RuntimeError as error:
        return str(error)
