"""Hosts on which `khvdrun` starts ranks by ssh, or by another command like it.

Each one is reached once, as long as it has ranks. `remote_ranks` starts them there.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_hvd.launch import rank
from keras_hvd.launch.other_hosts import LOST, Host, OtherHosts
from keras_hvd.launch.pipes import Pipes
from keras_hvd.launch.talk import PATIENCE_SECONDS, Talk
from keras_hvd.version import __version__
from keras_hvd.world.rendezvous.messages import MessageError

SSH = (
    *("ssh", "-o", "BatchMode=yes"),
    *("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=4"),
    *("-o", "ConnectTimeout=30"),
)
"""It asks nothing, and tells within five seconds that a host is gone."""

_LOGIN_SECONDS = 120.0


@dataclass(eq=False)
class _Host(Host):
    ranks: set[int] = field(default_factory=set)  # those that run
    agent: int = 0  # the process of the command
    status: int = LOST  # for ranks, if it is lost

    def give_up(self, status: int) -> None:
        """Ends the command."""
        self.status = status
        if self.agent:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.agent, signal.SIGKILL)


class ReachedHosts(OtherHosts[_Host]):
    """The hosts that have ranks.

    Args:
        agent: a command that runs another one on a host, as ssh does: both follow it.
        variables: its environment.
    """

    def __init__(self, agent: Sequence[str], variables: Mapping[str, str]):
        super().__init__()
        self._agent = agent
        self._variables = variables

    def start(self, host: str, number: int, stderr: int, /, **told: Any) -> None:
        if host not in self._hosts:
            (stdin, to_host), (from_host, stdout) = (
                os.pipe2(os.O_CLOEXEC) for _ in range(2)
            )
            # Nothing is sent before a login has ended.
            talk = Talk(self.loop, Pipes(from_host, to_host), _LOGIN_SECONDS, False)
            self._hosts[host] = _Host(talk)
            self.reached += 1
            reaching = self._reach(host, self._hosts[host], (stdin, stdout, stderr))
            self.loop.start(reaching)
        self._hosts[host].ranks.add(number)
        super().start(host, number, stderr, **told)

    def ask(self, host: str, /, **message: Any) -> None:
        super().ask(host, **message)
        if "signal" in message and host in self._hosts:
            _, number = message["signal"]
            if not self._hosts[host].talk.may_speak:
                # A login is not waited for.
                is_kill = number == signal.SIGKILL
                self._hosts[host].give_up(number if is_kill else 128 + number << 8)

    async def _reach(self, name: str, host: _Host, ends: tuple[int, int, int]) -> None:
        """Starts ranks on a host, until it has none or is lost."""
        command = [*self._agent, name, _remote_command()]
        why = f"{name} starts no rank"
        try:
            given = command, command[0], self._variables, None
            host.agent = rank.spawn(*given, ends)
        except (OSError, subprocess.SubprocessError) as error:
            why = str(error)
        # Without the command nothing is to be heard.
        for each in ends[:2]:
            os.close(each)
        try:
            while True:
                told = await host.talk.hear()
                version = told.get("version")
                if version not in (None, __version__):
                    why = (
                        f"{name} has keras_hvd {version}, and this host {__version__}: "
                        "install the same on all hosts"
                    )
                    break
                if version:
                    host.talk.may_speak = True
                    host.talk.patience = PATIENCE_SECONDS
                    why = f"{name} is not connected any more"
                host.ranks.discard(told.get("ended", -1))
                await self.on_told(name, told)
                if not host.ranks and self._hosts.get(name) is host:
                    del self._hosts[name]
                    host.talk.say(end=0, why="")
        except (OSError, MessageError) as error:
            if isinstance(error, TimeoutError):
                host.give_up(host.status)
        host.talk.close()
        self.reached -= 1
        is_lost = self._hosts.get(name) is host
        if is_lost:
            del self._hosts[name]
        why = why if host.status == LOST else ""
        self.on_lost(name if is_lost else "", why, host.status)


def _remote_command() -> str:
    """What a shell on the other host runs."""
    program = [sys.executable, "-m", "keras_hvd.launch.remote_ranks"]
    path = os.environ.get("PYTHONPATH")
    if path is not None:
        program = ["env", f"PYTHONPATH={path}", *program]
    return shlex.join(program)
