"""Starts ranks for the `khvdrun` of another host, and speaks for them.

The other one has reached this host by ssh, and then this program speaks through its
standard input and output; or this host has joined a job by its own `khvdrun`. Either
way the other's command, folder and variables count, and it shows the output. When the
connection ends, so does everything here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
import time
from typing import Any

from keras_hvd.backends.current import allocator
from keras_hvd.exceptions import RendezvousError
from keras_hvd.job import cores
from keras_hvd.launch import guardian, node_ranks, rank
from keras_hvd.launch.joined_job import Decider, JoinedJob
from keras_hvd.launch.options import Options
from keras_hvd.launch.output import Screen
from keras_hvd.launch.pipes import Pipes
from keras_hvd.launch.talk import Talk
from keras_hvd.world.launchers.variables import RENDEZVOUS
from keras_hvd.world.rendezvous import network_interfaces, secret
from keras_hvd.world.rendezvous.gathering import Group, RendezvousClient

_CANNOT_EXECUTE = 127 << 8  # a wait status
_UNREACHABLE = 255 << 8

# Without a word from khvdrun, on a host that is cut off from it.
_PATIENCE_SECONDS = 60.0


class _FirstHost(Decider):
    """The connection with the first host's `khvdrun`, with which the job ends."""

    def __init__(self, group: Group, *arguments: Any):
        super().__init__(*arguments)
        self.place = f"node 0 at {group.place}"
        self._group = group

    async def _keep(self) -> None:
        deadline = time.monotonic() + self._group.timeout
        client = RendezvousClient(self.loop, self._group, deadline)
        with contextlib.closing(client):
            try:
                self.own_address = await client.connect()
            except RendezvousError as error:
                self._on_told({"gone": f"error: {error}"})
                return
            (proven,) = client.keep()
        how = await self._hear(Talk(self.loop, proven))
        self._on_told({"gone": f"{self.place} is gone: {how}"})


class _ByPipes(Decider):
    """The connection with the `khvdrun` that has started this process by ssh."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        # ssh tells at which address it has reached this host.
        self.own_address = "".join(os.environ.get("SSH_CONNECTION", "").split()[2:3])
        self._pipes = Pipes(os.dup(0), os.dup(1))
        # The ranks' output, and this program's, must not come between messages.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)

    async def _keep(self) -> None:
        await self._hear(Talk(self.loop, self._pipes, _PATIENCE_SECONDS))
        self._on_told({"end": 0, "why": ""})


class _Output(Screen):
    """Passes on what a rank writes: its lines, and the screen that they are for.

    `of` are the rank's number, the count of its starts, and the descriptor.
    """

    is_holding = False

    def __init__(self, decider: Decider, of: tuple[int, int, int]):
        super().__init__(2)
        self.is_terminal = False
        self._decider = decider
        self._of = of

    @property
    def is_full(self) -> bool:
        return not self._decider.is_silent

    def feed(self, data: bytes) -> None:
        self._decider.say(output=self._of, content=data.decode("latin-1"))

    def show_held(self) -> None:
        """Holds nothing."""

    def finish(self) -> None:
        self.feed(b"")


class RemoteRanks(JoinedJob):
    """The ranks of this host."""

    def _decider_of(self, group: Group | None) -> Decider:
        self._outputs: dict[tuple[int, ...], _Output] = {}
        given = self._hello, self._on_told
        return _ByPipes(*given) if group is None else _FirstHost(group, *given)

    def _on_told(self, told: dict[str, Any]) -> None:
        super()._on_told(told)
        if "close" in told:
            self._outputs[tuple(told["close"])].is_broken = True

    def _start_rank(self, here: int, start: int = 1) -> None:
        begin = functools.partial(self._begin_rank, here, start)
        out, err = (_Output(self._decider, (here, start, n)) for n in (1, 2))
        self._outputs |= {(here, start, 1): out, (here, start, 2): err}
        options, lines = self._options, lambda number, options, output: output
        self._add(rank.start(here, options, begin, out, err, start, lines))

    def _begin_rank(self, here: int, start: int, ends: tuple[int, int, int]) -> int:
        asked, environment = self._asked[here], self._environment(here)
        os.chdir(asked["directory"])
        path = environment.get("PATH")
        executable = shutil.which(asked["command"][0], path=path)
        if executable is None:
            raise FileNotFoundError(0, "command not found")
        given = asked["command"], executable, environment, self._cores_of(here)
        return rank.spawn(*given, ends)

    def _environment(self, here: int) -> dict[str, str]:
        asked, own = self._asked[here], {**os.environ, **self._options.variables}
        of_other_jobs = {RENDEZVOUS}
        if secret.VARIABLE in asked["variables"]:
            of_other_jobs |= {secret.VARIABLE, secret.FILE_VARIABLE}
        for name in of_other_jobs:
            own.pop(name, None)
        given = {**own, **asked["variables"]}
        names = [each for each in (self._decider.own_address, asked["host"]) if each]
        address = network_interfaces.reached_as(names, asked["interfaces"])
        return {
            **cores.thread_variables(asked["ranks_here"]),
            **given,
            **allocator.variables(given),
            **self._renewal(here, address),
        }

    def _cores_of(self, here: int) -> set[int] | None:
        asked = self._asked[here]
        count = asked["ranks_here"]
        if not asked["is_bound"]:
            return None
        # The host may have had more slots before.
        return cores.shares(count)[asked["renewal"]["slot"] % count]

    def _on_no_start(self, number: int, error: Exception) -> None:
        asked = self._asked[number]
        host, status = asked["host"], _CANNOT_EXECUTE
        what = f" cannot execute {asked['command'][0]!r} in {asked['directory']!r}"
        if isinstance(error, RendezvousError):
            what, status = "", _UNREACHABLE
        why = f"{host}{what}: {getattr(error, 'strerror', None) or error}"
        said = f"khvdrun: {why}\n".encode()
        self._outputs[number, asked["count"], 2].feed(said)
        self._tell_of_end(number, 0, why, status)

    def _forward(self, number: signal.Signals) -> None:
        if isinstance(self._decider, _ByPipes):
            self._finish(128 + number)
        else:
            super()._forward(number)

    def _terminate(self) -> None:
        # Whoever wants them to end by themselves has sent them a signal before.
        self._kill()


def main() -> int:
    """Starts ranks as `khvdrun` says, until it says no more; returns an exit code."""
    options = Options(ranks=1)
    own, _ = node_ranks.of_this_host(options)

    def job(held: int, mask: set[int]) -> RemoteRanks:
        return RemoteRanks(options, own, held, mask, group=None)

    return guardian.run(job)


if __name__ == "__main__":
    sys.exit(main())
