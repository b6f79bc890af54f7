"""Reads what a report shows from timelines, instead of a recording.

It adds up what the recording would have (tf_ops/timeline/recording.cc), one line of a
file after the other, so that a file of any length takes little memory.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_hvd.report.record import Event, Intervals, JobRecord, Member, Tensor
from keras_hvd.report.stretches import SUMS, CoveredTime, Stretches
from keras_hvd.timeline import events
from keras_hvd.timeline.events import NotATimelineError

# How much later than a step what belongs to it may be in the file, in seconds.
_SETTLED = 0.5
# As in the recording.
_MOST_NAMES, _MOST_TENSORS, _MOST_EVENTS = 16384, 1024, 256
# A line of the file has no more.
_MOST_ARRIVALS = 64
_OTHERS = "(all other tensors)"
# A row that the file has not used for so many new ones is not used again.
_MOST_ROWS = 4 * _MOST_NAMES
# How many spans are kept until the steps that are over are added up.
_SPANS_AT_ONCE = 8192
# A file begins with a page that has its start.
_PAGE_BYTES = 4096
# Times at which a file began are whole seconds.
_EXACT_TO = 1.0
_NOT_MOVING = "WAIT_FOR_RANKS", "WAIT_FOR_INPUTS"
_UNKNOWN = (
    "Samples, loss, command, cores and settings, which a timeline does not have. "
    "khvdrun --report records them."
)


def read(paths: Sequence[str | os.PathLike[str]]) -> JobRecord:
    """Reads timelines of one job.

    Args:
        paths: The files, in any order. The job has written one after the other.

    Returns:
        What the job did while a timeline was on. The time between two files is left
        out.

    Raises:
        NotATimelineError: keras_hvd has not written one of them.
        ValueError: They are of several jobs.
        OSError: One cannot be read.

    Example:

    >>> read(["/dev/null"])
    Traceback (most recent call last):
    keras_hvd.timeline.events.NotATimelineError: '/dev/null' is no timeline of keras_hvd
    """
    starts = [(_start_of(path), os.fspath(path)) for path in paths]
    starts.sort(key=lambda each: each[0]["time"])
    (first, name), *_ = starts
    job = _Job(first["size"])
    until, last = -np.inf, name
    for start, path in starts:
        if start["size"] != job.size:
            sizes = f"{job.size} ranks, and {path!r} of one of {start['size']}"
            raise ValueError(f"{name!r} is of a job of {sizes}: make a report of each")
        if start["time"] + _EXACT_TO < until:
            both = f"{last!r} and {path!r} were written at the same time"
            raise ValueError(f"{both}, so by two jobs: make a report of each")
        until, last = start["time"] + job.add_file(path), path
    return job.record(first["time"], len(starts))


def _start_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """When a file began, and how many ranks its job has."""
    with open(path, "rb") as file:
        lines = file.read(_PAGE_BYTES).decode(errors="replace").splitlines()
    found: dict[str, Any] = {}

    def add(event: Mapping[str, Any]) -> None:
        if event["name"] == "start":
            found.update(time=float(event["args"]["time"]))
            found.update(size=int(event["args"]["size"]))

    events.read(lines, add)
    if found.get("size", 0) < 1:
        raise NotATimelineError(f"{os.fspath(path)!r} is no timeline of keras_hvd")
    return found


@dataclasses.dataclass
class _Step:
    begin: float
    last_own: float = -np.inf
    """When rank 0 submitted its last tensor."""


@dataclasses.dataclass
class _Request:
    """A request from its decision to its end."""

    batch: int
    step: _Step
    first: float
    last: float
    own: float = 0.0
    """When rank 0 submitted it."""
    is_own: bool = True
    began: float = 0.0


class _Job:
    """What the files of a job add up to. Times are in seconds."""

    def __init__(self, size: int):
        self.size = size
        self._stretches = Stretches(size)
        self._tensors: dict[str, Tensor] = {}
        self._events: list[Event] = []
        self._left_out = self._events_left_out = self._damaged = 0
        self._is_whole = True
        self._members = [Member(rank, None) for rank in range(size)]
        self._moving, self._busy = CoveredTime(), CoveredTime()
        self._waits = [CoveredTime() for _ in range(size)]
        self._waited_for = [CoveredTime() for _ in range(size)]
        self._bytes: list[tuple[float, int]] = []  # when, and how many
        self._newest = 0.0  # end of a span
        self._reached = 0.0  # and time of a mark

    def add_file(self, path: str) -> float:
        """Adds a file, and returns its length in seconds."""
        self._offset = begin = self._newest
        self._rows: dict[int, str] = {}
        self._open: dict[int, _Request] = {}
        self._begun = -1  # the last batch that did
        self._stalls: dict[str, Event] = {}
        self._steps: list[_Step] = []  # begun, and not in the stretches
        self._names: set[str] = set()  # of the last of them
        self._spans = 0
        self._last_phase: tuple[float, float] | None = None
        with open(path, encoding="utf-8", errors="replace") as lines:
            self._is_whole, damaged = events.read(lines, self._add)
        self._damaged += damaged
        if self._steps:
            self._add_steps(max(self._newest, self._steps[-1].begin))
        return self._newest - begin

    def record(self, begin: float, files: int) -> JobRecord:
        """All of it."""
        rows = self._stretches.rows()
        waits, waited_for = np.split(rows[:, SUMS:], 2, axis=1)
        unknown = np.full(len(rows), np.nan)
        intervals = Intervals(
            *(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]),
            *(rows[:, 4], rows[:, 5], rows[:, 6], rows[:, 7]),
            waits=waits,
            waited_for=waited_for,
            samples=unknown,
            loss=unknown,
        )
        notes = [_UNKNOWN]
        if files > 1:
            notes.append(f"What lies between the {files} timelines is left out.")
        if self._damaged:
            notes.append(f"{self._damaged} lines are damaged, and left out.")
        if self._events_left_out:
            text = f"{self._events_left_out} later ones are left out"
            self._events.append(Event(self._events[-1].time, "warning", text))
        return JobRecord(
            size=self.size,
            begin=begin,
            seconds=max(self._newest, self._reached),
            intervals=intervals,
            tensors=list(self._tensors.values()),
            events=self._events,
            members=self._members,
            settings={},
            command="",
            ended=(
                "ended, or went on without a timeline"
                if self._is_whole
                else "was killed, or still runs: the timeline has no end"
            ),
            left_out=self._left_out,
            not_known=" ".join(notes),
        )

    # --- the events of a file -------------------------------------------------------

    def _add(self, event: Mapping[str, Any]) -> None:
        kind, name = event["ph"], event["name"]
        if event.get("pid") == events.OTHER_HOSTS:
            if name == "thread_name":
                self._add_host(event["args"]["name"])
            return
        if kind == "i":
            self._reached = max(self._reached, self._time(event["ts"]))
        if kind == "X":
            self._add_span(name, event)
        elif name == "thread_name":
            names = event["args"]
            self._rows[event["tid"]] = names.get("tensor", names["name"])
            self._rows.pop(event["tid"] - _MOST_ROWS, None)
        elif name == "NOT_RECORDED":
            self._left_out += event["args"]["requests"]
        elif name == "WAITING_FOR_RANK":
            self._add_missing(self._rows[event["tid"]], event["args"])

    def _add_host(self, leader: str) -> None:
        found = re.fullmatch(r"rank (\d+) \(pid (\d+) on (.+)\)", leader)
        if found:
            rank, process, host = found.groups()
            self._members[int(rank)] = Member(int(rank), host, process=int(process))

    def _add_span(self, name: str, event: Mapping[str, Any]) -> None:
        row, arguments = event["tid"], event["args"]
        begin, seconds = self._time(event["ts"]), 1e-6 * event["dur"]
        if name.startswith("NEGOTIATE_"):
            self._add_request(row, begin, seconds, arguments)
        elif name == "QUEUE":
            self._begin(row, begin + seconds, arguments["batch"])
        elif "requests" in arguments:
            self._end(row, begin + seconds, arguments)
        elif name not in _NOT_MOVING and self._last_phase != (begin, seconds):
            # Every tensor of a batch has the batch's shared phases in its row.
            self._last_phase = begin, seconds
            self._moving.add(begin, begin + seconds)
            self._busy.add(begin, begin + seconds)
        self._newest = max(self._newest, begin + seconds)
        self._spans += 1
        if self._spans >= _SPANS_AT_ONCE:
            self._flush()

    def _time(self, microseconds: float) -> float:
        return self._offset + 1e-6 * microseconds

    def _add_request(
        self, row: int, first: float, seconds: float, arguments: Mapping[str, Any]
    ) -> None:
        name, ready = self._rows[row], arguments["ready"]
        arrivals = sorted(
            (first + 1e-6 * late, int(rank)) for rank, late in ready.items()
        )
        last, latest = arrivals[-1]
        self._note_step(name, first)
        self._end_stall(name, first, last)
        for since, rank in arrivals:
            self._waits[rank].add(since, last)
        if len(arrivals) > 1:
            self._waited_for[latest].add(arrivals[-2][0], last)
        request = _Request(arguments["batch"], self._steps[-1], first, last)
        if "0" in ready:
            request.own = first + 1e-6 * ready["0"]
        elif len(ready) == _MOST_ARRIVALS:
            request.own = first
        else:
            # Rank 0 has joined before and gives zeros, or others do this alone.
            request.own, request.is_own = first + seconds, False
        self._open[row] = request

    def _note_step(self, name: str, first: float) -> None:
        if self._steps and name not in self._names and len(self._names) < _MOST_NAMES:
            self._names.add(name)
            return
        self._names = {name}
        # The first step of a later file follows the last one of the file before.
        begin = self._offset or first
        if self._steps:
            begin = max(first, self._steps[-1].begin)
        self._steps.append(_Step(begin))

    def _begin(self, row: int, began: float, batch: int) -> None:
        self._begun = batch
        request = self._open[row]
        request.began = began
        request.step.last_own = max(request.step.last_own, request.own)

    def _end(self, row: int, end: float, arguments: Mapping[str, Any]) -> None:
        request = self._open.pop(row)
        tensor = self._tensor(self._rows[row])
        tensor.times += 1
        tensor.bytes += arguments["bytes"]
        tensor.negotiating += request.last - request.first
        tensor.queued += request.began - request.last
        tensor.running += end - request.began
        self._busy.add(request.own, end)
        self._bytes.append((end, arguments["bytes"]))
        if arguments.get("failed"):
            text = f"the collective of {self._rows[row]!r} failed"
            self._add_event(Event(end, "warning", text))

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors and len(self._tensors) >= _MOST_TENSORS - 1:
            name = _OTHERS
        return self._tensors.setdefault(name, Tensor(name, 0, 0, 0.0, 0.0, 0.0))

    # --- stalls and failures --------------------------------------------------------

    # The ranks that a request waits for come one after the other.
    def _add_missing(self, name: str, arguments: Mapping[str, Any]) -> None:
        since, rank = self._time(arguments["since"]), int(arguments["rank"])
        stall = self._stalls.get(name)
        if stall is not None and stall.time == since:
            stall.text += f" and rank {rank}"
            return
        stall = Event(since, "stall", f"{name!r} waited for rank {rank}")
        self._stalls[name] = stall
        self._add_event(stall)

    def _end_stall(self, name: str, first: float, last: float) -> None:
        stall = self._stalls.pop(name, None)
        if stall is not None and stall.time == first:
            stall.text += f", for {last - first:.1f} s"

    def _add_event(self, event: Event) -> None:
        if len(self._events) < _MOST_EVENTS:
            self._events.append(event)
        else:
            self._events_left_out += 1

    # --- steps ----------------------------------------------------------------------

    def _flush(self) -> None:
        self._spans = 0
        # Batches run in the order of their numbers: the end of an earlier one was lost.
        self._open = {
            row: request
            for row, request in self._open.items()
            if request.batch >= self._begun
        }
        settled = min(
            (request.own for request in self._open.values() if request.is_own),
            default=np.inf,
        )
        settled = min(settled, self._newest - _SETTLED)
        over = sum(step.begin <= settled for step in self._steps[1:])
        if over:
            self._add_steps(self._steps[over].begin, over)

    def _add_steps(self, end: float, count: int | None = None) -> None:
        """Adds the first of them, all if there is no `count`, until `end`."""
        steps = self._steps[:count]
        del self._steps[:count]
        begins = np.array([step.begin for step in steps])
        ends = np.append(begins[1:], end)
        exposed = np.clip([step.last_own for step in steps], begins, ends)
        bounds = np.column_stack([exposed, ends]).ravel()
        moving = self._moving.take(bounds).reshape(-1, 2)
        waiting = self._busy.take(bounds).reshape(-1, 2) - moving
        times, sizes = np.array(self._bytes).reshape(-1, 2).T
        places = np.searchsorted(ends, times)
        passed = np.bincount(places, sizes, len(steps) + 1)
        self._bytes = self._bytes[len(places) - int((places == len(steps)).sum()) :]
        sums = np.column_stack(
            [
                *(begins, ends, np.ones(len(steps)), passed[: len(steps)]),
                *(moving.sum(axis=1), waiting.sum(axis=1)),
                *(moving[:, 1], waiting[:, 1]),
            ]
        )
        waits = np.column_stack([time.take(ends) for time in self._waits])
        waited_for = np.column_stack([time.take(ends) for time in self._waited_for])
        for step in zip(sums, waits, waited_for, strict=True):
            self._stretches.add(*step)
