"""Asks the user's script, again and again, which hosts a job may use."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from typing import Any

from keras_hvd.exceptions import RendezvousError
from keras_hvd.launch import hosts, processes
from keras_hvd.launch.hosts import HostSlots
from keras_hvd.launch.usage import UsageError

# As Horovod asks.
_PAUSE_SECONDS = 1.0
_MOST_SECONDS = 60.0
_MOST_BYTES = 1 << 20


class Discovery:
    """The script, and its answers. The last right one holds.

    Args:
        script: a command line for a shell. It prints a host in each line, as `node0` or
            `node0:4`.
        slots: the number for hosts without one.

    Example:

    >>> discovery = Discovery("echo node0; echo node1:2", 4)
    >>> discovery.wait_for(6, 60.0)
    [HostSlots(name='node0', slots=4), HostSlots(name='node1', slots=2)]
    """

    def __init__(self, script: str, slots: int):
        self._script = script
        self._slots = slots
        self._started: subprocess.Popen[bytes] | None = None
        self._answer = b""
        self._said = ""
        self.next_time: float | None = 0.0
        """When there is something to do, by `time.monotonic`."""

    def wait_for(self, count: int, timeout: float) -> list[HostSlots]:
        """The first hosts that have so many slots. Raises RendezvousError, OSError."""
        deadline = time.monotonic() + timeout
        why = "it has not ended"
        while (now := time.monotonic()) < deadline:
            named, reason = self._ask(deadline)
            if named is not None:
                slots = sum(each.slots or 1 for each in named)
                if slots >= count:
                    return named
                reason = f"its hosts have {slots} slots"
            why = reason or why
            time.sleep(max(0.0, min(now + _PAUSE_SECONDS, deadline) - time.monotonic()))
        raise RendezvousError(
            f"--host-discovery-script {self._script}: {count} slots are wanted, and "
            f"after {timeout:g} s {why}. It is to print a host in each line, as "
            "node0:4; --start-timeout gives it longer"
        )

    def _ask(self, deadline: float) -> tuple[list[HostSlots] | None, str]:
        """Its answer, or why there is none; "" if there is none by the deadline."""
        self.start()
        assert self._started is not None, "just now"
        process = self._started.pid
        ended = os.pidfd_open(process)
        watched: list[Any] = [ended, self]
        try:
            while ended not in (ready := _readable(watched, deadline)):
                if not ready:
                    self.stop()
                    self.end(os.waitpid(process, 0)[1])
                    return None, ""
                if not self.hear():
                    watched.remove(self)
            self.hear()
            return self.end(os.waitpid(process, 0)[1])
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(ended)

    def start(self) -> None:
        """Starts the script. Raises OSError."""
        self._answer, here = b"", os.getpid()
        self._started = subprocess.Popen(
            ["sh", "-c", self._script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(here),
        )
        os.set_blocking(self.fileno(), False)
        self.next_time = time.monotonic() + _MOST_SECONDS

    def fileno(self) -> int:
        """The descriptor of what the script says."""
        assert self._started is not None and self._started.stdout is not None
        return self._started.stdout.fileno()

    @property
    def is_asking(self) -> bool:
        """Whether the script runs."""
        return self._started is not None

    def is_of(self, process: int) -> bool:
        """Whether this process is the script."""
        return self._started is not None and self._started.pid == process

    def hear(self) -> bool:
        """Takes what it has said; returns whether there may be more."""
        try:
            said = os.read(self.fileno(), _MOST_BYTES)
        except BlockingIOError:
            return True
        self._answer += said[: _MOST_BYTES - len(self._answer)]
        return bool(said)

    def stop(self) -> None:
        """Kills it, since it takes too long."""
        assert self._started is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._started.pid, signal.SIGKILL)
        self.next_time = None

    def end(self, status: int) -> tuple[list[HostSlots] | None, str]:
        """Its answer once it has ended, or why there is none, which it says once."""
        assert self._started is not None and self._started.stdout is not None
        # The loop of khvdrun has collected it.
        self._started.returncode = 0
        self._started.stdout.close()
        self._started = None
        is_late = self.next_time is None
        self.next_time = time.monotonic() + _PAUSE_SECONDS
        try:
            if is_late:
                raise UsageError(f"it has not ended within {_MOST_SECONDS:g} s")
            found = self._read(os.waitstatus_to_exitcode(status), self._answer)
        except UsageError as error:
            why, is_new = str(error), str(error) != self._said
            self._said = why
            return None, why if is_new else ""
        self._said = ""
        return found, ""

    def _read(self, code: int, answer: bytes) -> list[HostSlots]:
        if code < 0:
            raise UsageError(f"it was killed by signal {-code}")
        if code != 0:
            raise UsageError(f"its exit code was {code}")
        found = hosts.from_lines(answer.decode(errors="replace"), "its answer")
        return [HostSlots(each.name, each.slots or self._slots) for each in found]


def _readable(watched: list[Any], deadline: float) -> list[Any]:
    return select.select(watched, [], [], max(0.0, deadline - time.monotonic()))[0]
