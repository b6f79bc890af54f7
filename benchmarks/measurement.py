"""How the benchmarks measure: contenders asked in turn, medians, and a description.

All contenders of a benchmark are started once. Then one at a time gets a command, round
after round, so that a change on the machine meanwhile is a change for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import mmap
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Here and in the contenders the checkout's package, even where none is installed.
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))
from keras_hvd.job import cores  # noqa: E402

CONTENDERS = Path(__file__).resolve().parent / "contenders"
# A job that does not answer by then is given up.
_PATIENCE_SECONDS = 300
# The first fields of /proc/stat; the rest is counted in these already.
_STAT_COLUMNS = ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"]


class ContenderError(Exception):
    """A contender failed; the text has the end of its output."""


class Job:
    """The processes of one contender.

    Args:
        name: for messages.
        commands: one launcher, or every rank.
        ranks: how many connect.
        variables: environment variables, beside those of this process.
        pass_fds: files that the commands inherit.

    Raises:
        ContenderError: they did not start.
    """

    def __init__(
        self,
        name: str,
        commands: Callable[[str], list[list[str | Path]]],
        ranks: int,
        variables: dict[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ):
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        path = f"{self._folder.name}/socket"
        self._output = open(f"{self._folder.name}/output", "w+b")  # noqa: SIM115
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(ranks)
        self._processes = [
            subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**environment(), **(variables or {})},
                pass_fds=pass_fds,
                start_new_session=True,
            )
            for command in commands(path)
        ]
        self._streams = []
        try:
            with listener:
                hellos = [self._accept(listener) for _ in range(ranks)]
        except BaseException:
            self.close()
            raise
        self.version = hellos[0]["version"]
        self.cores = [hello["cores"] for hello in sorted(hellos, key=_rank_of)]

    def ask(self, **command: object) -> list[dict]:
        """Gives every rank a command and waits for all answers.

        Args:
            command: the arguments of the ranks' `measure`.

        Returns:
            The answers, rank 0's first.

        Raises:
            ContenderError: a rank failed, ended, or did not answer in time.
        """
        text = json.dumps(command) + "\n"
        try:
            for _, stream in self._streams:
                stream.write(text)
                stream.flush()
            answers = [stream.readline() for _, stream in self._streams]
        except OSError as error:
            raise self._failed(f"did not answer ({error})") from None
        if not all(answers):
            raise self._failed("ended")
        parsed = [json.loads(answer) for answer in answers]
        for answer in parsed:
            if "error" in answer:
                raise ContenderError(f"{self.name}: {answer['error']}")
        return parsed

    def close(self) -> None:
        """Ends the processes: they end when they are not asked any more."""
        for _, stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()
        for process in self._processes:
            try:
                process.wait(20 if self._streams else 0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes, self._streams = [], []
        self._output.close()
        self._folder.cleanup()

    def _accept(self, listener: socket.socket) -> dict:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        listener.settimeout(0.5)
        while True:
            try:
                connection, _ = listener.accept()
                break
            except TimeoutError:
                ended = [each for each in self._processes if each.poll() is not None]
                if ended or time.monotonic() > deadline:
                    raise self._failed("did not start") from None
        connection.settimeout(_PATIENCE_SECONDS)
        stream = connection.makefile("rw", encoding="utf-8")
        hello = json.loads(stream.readline() or '{"rank": 0}')
        if "version" not in hello:
            raise self._failed("did not start")
        self._streams.append((hello["rank"], stream))
        self._streams.sort(key=lambda pair: pair[0])
        return hello

    def _failed(self, how: str) -> ContenderError:
        self._output.seek(0)
        written = self._output.read().decode(errors="replace").strip().splitlines()
        return ContenderError("\n".join([f"{self.name} {how}", *written[-8:]]))


def _rank_of(hello: dict) -> int:
    return hello["rank"]


def environment() -> dict[str, str]:
    """The environment of processes that import keras_hvd."""
    paths = filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@dataclass(eq=False)
class Series:
    """One thing that is measured again and again.

    Args:
        name: in tables and in JSON.
        job: the processes that measure it.
        variant: its name in the job.
        optional: whether the others are of use without it.
    """

    name: str
    job: Job
    variant: str
    optional: bool = False
    seconds: list[float] = field(default_factory=list)
    repeats: int = 0

    def measure(self, size: int, repeats: int) -> list[float]:
        """One visit: the calls, after some that warm up caches and wake threads."""
        warm_up = min(10, repeats // 5)
        answers = self.job.ask(
            variant=self.variant, size=size, repeats=repeats, warm_up=warm_up
        )
        # Ranks run in step: rank 0's calls, one after the other, take all the time.
        return answers[0]["seconds"]


def interleave(
    series: list[Series], size: int, seconds: float, rounds: int
) -> dict[str, dict[str, float]]:
    """Measures every series in turn, round after round.

    Args:
        series: all of them. An optional one that fails is reported, and left out from
            then on.
        size: in bytes.
        seconds: for how long to measure each in all rounds together.
        rounds: how many.

    Returns:
        Name of the series: its `summary`.

    Raises:
        ContenderError: another one failed.
    """
    for each in _working(series):
        each.seconds = []
        with _giving_up(each, series):
            each.measure(size, 1)  # a size's first call makes and touches memory
            once = statistics.median(each.measure(size, 2))
            each.repeats = max(2, min(2000, math.ceil(seconds / rounds / once)))
    for _ in range(rounds):
        for each in _working(series):
            with _giving_up(each, series):
                each.seconds += each.measure(size, each.repeats)
    return {each.name: summary(each.seconds) for each in series}


def take_turns(jobs: dict[str, Job], rounds: int) -> dict[str, list[float]]:
    """Lets jobs that train do an epoch in turn, round after round.

    Args:
        jobs: by name.
        rounds: how many epochs of each.

    Returns:
        Name of the job: seconds of a step, the ranks' mean, in each round.

    Raises:
        ContenderError: a job failed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for name, answers in turns(jobs, rounds):
        seconds[name].append(mean_of(answers, "seconds"))
    return seconds


def turns(jobs: dict[str, Job], rounds: int) -> Iterator[tuple[str, list[dict]]]:
    """Lets jobs that train do an epoch in turn; yields a name, and what ranks say."""
    for number in range(rounds):
        # The first one of a round is the last one of the next.
        for name in list(jobs)[:: 1 if number % 2 else -1]:
            yield name, jobs[name].ask()


def mean_of(answers: list[dict], what: str) -> float:
    """The ranks' mean of a time of a step."""
    return statistics.mean(answer[what][0] for answer in answers)


def _working(series: list[Series]) -> Iterator[Series]:
    """The series that have not been given up by the time their turn comes."""
    for each in list(series):
        if each in series:
            yield each


@contextlib.contextmanager
def _giving_up(failing: Series, series: list[Series]) -> Iterator[None]:
    try:
        yield
    except ContenderError as error:
        if not failing.optional:
            raise
        print(f"Left out from here on: {error}", flush=True)
        failing.job.close()
        series[:] = [each for each in series if each.job is not failing.job]


def summary(values: list[float]) -> dict[str, float]:
    """Median and spread.

    Args:
        values: at least one.

    Returns:
        `median`, `p10` and `p90` (a tenth of the values is smaller, or larger), `mean`
        and `count`.
    """
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
        "mean": statistics.fmean(ordered),
        "count": len(ordered),
    }


def cores_of_ranks(ranks: int) -> str:
    """The cores that `khvdrun --bind-to cores` gives each rank, as an argument."""
    shares = [",".join(map(str, sorted(share))) for share in cores.shares(ranks)]
    return "/".join(shares)


def end_on_sigterm() -> None:
    """Makes SIGTERM end this process like an exception, so that jobs are ended too."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def machine() -> dict[str, object]:
    """The facts about this machine that a reader needs to compare figures."""
    return {
        "processor": _first("/proc/cpuinfo", "model name"),
        "cores": cores.available(),
        "caches": _caches(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE / 2**30),
        "kernel": platform.release(),
        "virtual": "hypervisor" in _first("/proc/cpuinfo", "flags").split(),
        "huge_pages": _huge_pages(),
        "python": platform.python_version(),
        "busy_cores_before": round(_busy_cores(), 2),
    }


def _busy_cores(seconds: float = 1.0) -> float:
    """How many cores others use. (The load average still counts what ran before.)"""
    before, since = _core_seconds(), time.monotonic()
    time.sleep(seconds)
    return (_core_seconds() - before) / (time.monotonic() - since)


def _core_seconds() -> float:
    """The time that all cores worked, or that the host kept from this machine."""
    columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = dict(zip(_STAT_COLUMNS, map(int, columns)))
    busy = sum(ticks.values()) - ticks["idle"] - ticks["iowait"]
    return busy / os.sysconf("SC_CLK_TCK")


def _first(file: str, key: str) -> str:
    """The value of the first `key : value` line."""
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return "unknown"


def _caches() -> list[str]:
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size, shared = (
            (index / name).read_text().strip()
            for name in ("level", "type", "size", "shared_cpu_list")
        )
        found.append(f"L{level} {kind.lower()} {size} (cores {shared})")
    return found


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text[text.index("[") + 1 : text.index("]")]


def add_arguments(parser: argparse.ArgumentParser, seconds: float, rounds: int) -> None:
    """Adds the options of a benchmark that measures single calls.

    Args:
        parser: the benchmark's.
        seconds: default of --seconds.
        rounds: default of --rounds.
    """
    add_output_argument(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help=f"to measure each figure, in all rounds together (default: {seconds})",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help=f"turns of each contender at each figure (default: {rounds})",
    )


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the option that all benchmarks have."""
    parser.add_argument(
        "--output",
        type=Path,
        default=CONTENDERS.parent / "results",
        metavar="FOLDER",
        help="for JSON and plot (default: benchmarks/results)",
    )
