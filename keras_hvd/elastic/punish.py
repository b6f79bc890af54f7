"""Breaks an elastic job on purpose, again and again, and tells whether it goes on.

    python -m keras_hvd.elastic.punish --events 20 -- \\
        khvdrun -np 4 --min-np 2 --blacklist-cooldown-range 1 2 python train.py

It starts the command, and knows of the job what everyone may: what khvdrun says, and
the ranks' processes, which have its variables. A seed chooses what happens.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import math
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from keras_hvd.elastic.events import KINDS, Event, Hosts, Membership, choose
from keras_hvd.world import renewal
from keras_hvd.world.renewal import Renewal

# In the environment of all that the command starts.
_MARK = "_KERAS_HVD_PUNISHED"

_LOOK_SECONDS = 0.05
_MOST_SECONDS_BETWEEN_TWO = 0.2
_END_SECONDS = 10.0


# By the numbers of ranks, with what they were told.
Processes = dict[int, tuple[int, Renewal]]


class _HangError(Exception):
    """Something has not happened in time."""


class _EndError(Exception):
    """The job has ended."""


class Usage:
    """What a process holds: when it was first seen, and now.

    Args:
        name: what it is.
        process: its id.

    Example:

    >>> str(Usage("rank 0", os.getpid()))
    'rank 0 (process ...) over 0 events: ... to ... descriptors, ... MiB of memory'
    """

    def __init__(self, name: str, process: int):
        self._name = f"{name} (process {process})"
        self._folder = Path("/proc", str(process))
        self._first = self._now = self._held()
        self.looks = 0

    def look(self) -> None:
        self._now = self._held()
        self.looks += 1

    def _held(self) -> tuple[int, int, int]:
        lines = (self._folder / "status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        kibibytes = int(status["VmRSS"].split()[0])
        descriptors = len(os.listdir(self._folder / "fd"))
        return descriptors, int(status["Threads"]), kibibytes >> 10

    def __str__(self) -> str:
        kinds = "descriptors", "threads", "MiB of memory"
        numbers = zip(self._first, self._now, kinds)
        changes = [f"{first} to {now} {kind}" for first, now, kind in numbers]
        return f"{self._name} over {self.looks} events: {', '.join(changes)}"


class Punisher:
    """A job, and what happens to it.

    Args:
        options: those of the command line.
    """

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._ranks = _number_after(options.command, "-np", "-n", "--num-proc")
        self._least = _number_after(options.command, "--min-np", "--min-num-proc")
        self._chance = random.Random(options.seed)
        self._job = Membership(self._ranks)
        self._hosts = Hosts(options.hosts_file) if options.hosts_file else None
        self._seconds: dict[str, list[float]] = {}
        self._usage: dict[str, dict[int, Usage]] = {"khvdrun": {}, "rank": {}}
        self._mark = uuid.uuid4().hex
        self._started = subprocess.Popen(
            options.command,
            stderr=subprocess.PIPE,
            env={**os.environ, _MARK: self._mark},
        )
        assert self._started.stderr is not None
        self._errors = self._started.stderr.fileno()
        self._line = b""
        self._last = "its start"

    def run(self) -> int:
        """Lets events happen, and then the job end. Returns an exit code."""
        causes: list[str] = []
        try:
            self._punish()
        except (_HangError, _EndError) as error:
            causes = [*filter(None, [str(error)]), *self._job.surprises]
        except KeyboardInterrupt:
            causes = ["it was interrupted"]
        finally:
            self._end()
        self._tell()
        made = sum(map(len, self._seconds.values()))
        if not causes and made < self._options.events:
            causes.append(
                f"the training has ended after {made} events: let it take longer"
            )
        causes += [f"process {process} is left" for process, _ in self._processes()]
        for cause in causes:
            _say(f"failed after {self._last}: {cause}")
        if causes:
            return 1
        _say("every rank that ended was killed, and no process is left")
        return 0

    def _punish(self) -> None:
        """Raises _EndError at the job's end, or _HangError."""
        while not self._all_train():
            self._hear_for(_LOOK_SECONDS)
        for number in range(1, self._options.events + 1):
            event, running = self._next()
            self._last = f"event {number}, {event}"
            _say(f"{self._last} (seed {self._options.seed})")
            self._make(event, running)
        if self._hosts is not None:
            self._hosts.restore()
        self._await(self._is_full, "have not become as many as before")
        _say("the job has survived, and may end")
        self._hear_for(math.inf)

    def _next(self) -> tuple[Event, Processes]:
        """Waits for a while, and chooses what is to happen to those that then run."""
        self._hear_for(self._chance.uniform(0, 2 * self._options.every))
        kinds, is_patient = self._options.only, self._chance.random() < 0.5
        while True:
            if is_patient:
                self._await(self._is_full, "have not become as many as before")
            # If the script has ended on one, all are about to end.
            self._await(self._all_run, "still run, and others have ended")
            running, least = self._processes_of_ranks(), self._least
            event = choose(self._chance, kinds, self._job, least, running, self._hosts)
            if event is not None:
                return event, running
            if is_patient:
                raise _HangError(f"no {' or '.join(kinds)} leaves {least} ranks")
            is_patient = True

    def _make(self, event: Event, running: Processes) -> None:
        between = self._chance.uniform(0, _MOST_SECONDS_BETWEEN_TWO)
        stopped_for = self._chance.uniform(0, 2 * self._options.every)
        began = time.monotonic()
        self._job.hit |= {*event.killed}
        if self._hosts is not None and event.host:
            self._hosts.toggle(event.host)
        if event.stopped is not None:
            _signal(running[event.stopped], signal.SIGSTOP)
        for number in event.killed:
            if number != event.killed[0]:
                self._hear_for(between)
            if not _signal(running[number], signal.SIGKILL):
                # It has just ended by itself.
                self._job.hit.discard(number)
        if event.stopped is not None:
            self._hear_for(stopped_for)
            _signal(running[event.stopped], signal.SIGCONT)
        self._await(self._goes_on, "have not gone on")
        self._seconds.setdefault(event.kind, []).append(time.monotonic() - began)
        self._look()

    # ---- The job and its processes

    def _goes_on(self) -> bool:
        leaving = self._hosts.ranks_away if self._hosts else set()
        return self._job.goes_on and not (self._job.hit or self._job.members & leaving)

    def _is_full(self) -> bool:
        most = min(self._ranks, self._hosts.slots) if self._hosts else self._ranks
        return self._goes_on() and len(self._job.members) >= most

    def _all_run(self) -> bool:
        running = self._processes_of_ranks()
        return self._goes_on() and self._job.members <= running.keys()

    def _all_train(self) -> bool:
        """Whether the first ranks have met, and are in a function of elastic.run."""
        running = self._processes_of_ranks().values()
        names = collections.Counter(told.name for _, told in running)
        with contextlib.suppress(OSError):
            return len(running) >= self._ranks and all(
                _has_met(process) and _connections(process, told) >= names[told.name]
                for process, told in running
            )
        return False

    def _processes(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Those of the job, with the variables with which they were started."""
        for process in sorted(map(int, filter(str.isdecimal, os.listdir("/proc")))):
            # It may have ended, or be another user's.
            with contextlib.suppress(OSError):
                given = Path(f"/proc/{process}/environ").read_bytes()
                pairs = (each.partition("=") for each in os.fsdecode(given).split("\0"))
                variables = {name: value for name, _, value in pairs}
                if variables.get(_MARK) == self._mark:
                    yield process, variables

    def _processes_of_ranks(self) -> Processes:
        """Those that run here."""
        found: Processes = {}
        for process, variables in self._processes():
            told = renewal.of(variables)
            with contextlib.suppress(OSError):
                if told is not None and _leads(process):
                    found.setdefault(told.number, (process, told))
        return found

    def _look(self) -> None:
        for process, variables in self._processes():
            if renewal.VARIABLE not in variables:
                self._note_usage("khvdrun", "khvdrun", process)
        for number, (process, _) in self._processes_of_ranks().items():
            if number in self._job.members:
                self._note_usage("rank", f"rank {number}", process)

    def _note_usage(self, kind: str, name: str, process: int) -> None:
        # It may just have ended.
        with contextlib.suppress(OSError, KeyError):
            usage = self._usage[kind].setdefault(process, Usage(name, process))
            usage.look()

    # ---- Time, and what is said in it

    def _await(self, is_so: Callable[[], bool], what: str) -> None:
        """Hears until it is so. Raises _HangError, or _EndError at the job's end."""
        deadline = time.monotonic() + self._options.limit
        while not is_so():
            if time.monotonic() > deadline:
                raise _HangError(f"ranks {what} for {self._options.limit:g} s")
            self._hear_for(_LOOK_SECONDS)

    def _hear_for(self, seconds: float) -> None:
        """Passes on what is said. Raises _EndError at the job's end."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            patience = None if math.isinf(left) else left
            if not select.select([self._errors], [], [], patience)[0]:
                return
            said = os.read(self._errors, 1 << 16)
            if not said:
                code = self._started.wait()
                raise _EndError(f"the job's exit code is {code}" if code else "")
            sys.stderr.buffer.write(said)
            sys.stderr.flush()
            *lines, self._line = (self._line + said).split(b"\n")
            for line in lines:
                self._job.hear(line.decode(errors="replace"))

    def _end(self) -> None:
        """Ends the job, if it has not ended."""
        for number in signal.SIGTERM, signal.SIGKILL:
            if self._started.poll() is None:
                self._started.send_signal(number)
                with contextlib.suppress(_EndError):
                    self._hear_for(_END_SECONDS)
        self._started.wait()

    def _tell(self) -> None:
        """Says what was seen."""
        count = sum(map(len, self._seconds.values()))
        _say(f"{count} of {self._options.events} events (seed {self._options.seed})")
        for kind, seconds in self._seconds.items():
            _say(
                f"{len(seconds)} {kind}: {statistics.median(seconds):.2f} s until the "
                f"job went on (median), {max(seconds):.2f} s (longest)"
            )
        for of_kind in self._usage.values():
            # Of those that were there for longest, one that has grown.
            longest = max((each.looks for each in of_kind.values()), default=0)
            for each in of_kind.values():
                if each.looks == longest:
                    _say(str(each))


def _leads(process: int) -> bool:
    """Whether a process is a rank, and neither a child of one nor what reaches it."""
    command = Path(f"/proc/{process}/cmdline").read_bytes()
    return os.getsid(process) == process and b"keras_hvd.launch." not in command


def _has_met(process: int) -> bool:
    """Whether it is in a job: it then has the engine's thread."""
    threads = Path(f"/proc/{process}/task").glob("*/comm")
    return any(each.read_text() == "keras_hvd\n" for each in threads)


def _connections(process: int, told: Renewal) -> int:
    """How many ranks speak with who renews the job, as seen on the process' host."""
    lines = Path(f"/proc/{process}/net/unix").read_text().splitlines()
    return sum(f"@{told.name}/renewal" in each and " 03 " in each for each in lines)


def _signal(rank: tuple[int, Renewal], number: signal.Signals) -> bool:
    """Returns whether the rank was there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank[0], number)
        return True
    return False


def _say(text: str) -> None:
    print(f"punish: {text}", file=sys.stderr, flush=True)


def _number_after(command: Sequence[str], *names: str) -> int:
    """The number that follows an option of khvdrun.

    >>> _number_after(["khvdrun", "-np", "4", "train"], "-np", "--num-proc")
    4
    """
    for word, value in zip(command, command[1:]):
        if word in names and value.isdecimal():
            return int(value)
    raise SystemExit(f"punish: the command needs {names[0]} with a number")


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if not KINDS.keys() >= {*kinds}:
        raise argparse.ArgumentTypeError(f"{text!r} is not of {', '.join(KINDS)}")
    return kinds


def main() -> int:
    """Punishes a job as the command line says, and returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m keras_hvd.elastic.punish",
        description="Breaks an elastic job on purpose, and tells whether it goes on.",
        epilog="Events: " + "; ".join(f"{k} ({what})" for k, what in KINDS.items()),
    )
    add = parser.add_argument
    add("--events", type=int, default=100, help="how many (100)")
    add("--seed", type=int, help="of all choices (a new one)")
    add("--every", type=float, default=1, help="seconds between two, on average (1)")
    add("--limit", type=float, default=60, help="seconds for the job to go on (60)")
    add("--only", type=_kinds, default=[*KINDS], help="kinds, as kill,stop (all)")
    text = "what --host-discovery-script prints, with node0:4 in each line"
    add("--hosts-file", type=Path, metavar="FILE", help=text)
    add("command", nargs="+", help="khvdrun and its arguments")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.randrange(1 << 32)
    # The job must not outlive what punishes it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return Punisher(options).run()


if __name__ == "__main__":
    sys.exit(main())
