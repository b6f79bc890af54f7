"""Reads the record of a job from timelines, instead of a recording.

It computes the sums of a recording (tf_ops/timeline/recording.cc), one line of a file
after the other, so that a file of any length takes little memory.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_hvd.report.record import Event, Intervals, JobRecord, Member, Tensor
from keras_hvd.timeline.events import NotATimelineError
from keras_hvd.timeline.spans import Spans
from keras_hvd.timeline.summary import MOST_NAMES, OWN, Request, Summary

# How much later in the file, in seconds, a step's own events may come.
_SETTLED = 0.5
# As in the recording.
_MOST_TENSORS, _MOST_EVENTS, _MOST_STRETCHES = 1024, 256, 2048
# The sums that a stretch has before the waits of ranks, and the waits for them.
_SUMS = 8
# The number of spans to keep before the finished steps are added up.
_SPANS_AT_ONCE = 8192
# A file begins with a page that has its start.
_PAGE_BYTES = 4096
# Times at which a file began are whole seconds.
_EXACT_TO = 1.0
_UNKNOWN = (
    "Samples, loss, command, cores and settings, which a timeline does not have. "
    "khvdrun --report records them."
)


def read(paths: Sequence[str | os.PathLike[str]]) -> JobRecord:
    """Reads timelines of one job.

    Args:
        paths: The files, in any order. The job has written one after the other.

    Returns:
        The job's record while a timeline was on. The time between two files is left
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
    starts.sort(key=lambda each: each[0].began)
    (first, name), *_ = starts
    job = _Job(first.size)
    until, last = -np.inf, name
    for start, path in starts:
        if start.size != first.size:
            sizes = f"{first.size} ranks, and {path!r} of one of {start.size}"
            raise ValueError(f"{name!r} is of a job of {sizes}: make a report of each")
        if start.began + _EXACT_TO < until:
            both = f"{last!r} and {path!r} were written at the same time"
            raise ValueError(f"{both}, so by two jobs: make a report of each")
        until, last = start.began + job.add_file(path), path
    return job.record(first.began, len(starts))


def _start_of(path: str | os.PathLike[str]) -> Summary:
    """A summary of the beginning of a file."""
    start = Summary()
    with open(path, "rb") as file:
        start.add(file.read(_PAGE_BYTES).decode(errors="replace").splitlines())
    if start.size < 1:
        raise NotATimelineError(f"{os.fspath(path)!r} is no timeline of keras_hvd")
    return start


@dataclasses.dataclass
class _Step:
    begin: float
    last_own: float = -np.inf
    """When rank 0 submitted its last tensor, but for those of callbacks."""


class _Job(Summary):
    """The sums over the files of a job. Times are in seconds."""

    unit = 1e-6
    most_tensors = _MOST_TENSORS

    def __init__(self, size: int):
        super().__init__()
        self._stretches = np.zeros((0, _SUMS + 2 * size))
        self._steps_each = 1  # of all stretches but the last
        self._steps_added = 0
        self._events: list[Event] = []
        self._events_left_out = 0
        self._members = [Member(rank, None) for rank in range(size)]
        self._moving, self._busy = Spans(), Spans()
        self._waiting = [Spans() for _ in range(size)]
        self._bytes: list[tuple[float, int]] = []  # when, and how many

    def add_file(self, path: str) -> float:
        """Adds a file, and returns its length in seconds."""
        self._begun = -1  # the last batch that did
        self._stalls: dict[str, Event] = {}
        self._steps: list[_Step] = []  # begun, and not in the stretches
        self._names: set[str] = set()  # of the last of them
        self._spans = 0
        with open(path, encoding="utf-8", errors="replace") as lines:
            self.add(lines)
        if self._steps:
            self._add_steps(max(self.last, self._steps[-1].begin))
        return self.last - self._begin

    def record(self, begin: float, files: int) -> JobRecord:
        """The record of all files."""
        rows = self._stretches
        sums, (waits, waited_for) = rows.T[:_SUMS], np.split(rows[:, _SUMS:], 2, axis=1)
        unknown = np.full(len(rows), np.nan)
        tensors = [
            Tensor(
                *(name, each.requests, each.bytes, each.negotiating),
                *(each.deciding + each.queued, each.running),
            )
            for name, each in self.tensors.items()
        ]
        notes = [_UNKNOWN]
        if files > 1:
            notes.append(f"What lies between the {files} timelines is left out.")
        if self.unreadable:
            notes.append(f"{self.unreadable} lines are damaged, and left out.")
        if self._events_left_out:
            text = f"{self._events_left_out} later ones are left out"
            self._events.append(Event(self._events[-1].time, "warning", text))
        return JobRecord(
            size=len(self._members),
            begin=begin,
            seconds=max(self.last, self.marked),
            intervals=Intervals(
                *(*sums, waits, waited_for, unknown, unknown, np.zeros(len(rows)))
            ),
            tensors=tensors,
            events=self._events,
            members=self._members,
            settings={},
            command="",
            ended=(
                "ended, or went on without a timeline"
                if self.is_whole
                else "was killed, or still runs: the timeline has no end"
            ),
            left_out=self.not_recorded,
            not_known=" ".join(notes),
        )

    # --- the events of a file -------------------------------------------------------

    def _add_host(self, leader: str) -> None:
        found = re.fullmatch(r"rank (\d+) \(pid (\d+) on (.+)\)", leader)
        if found:
            rank, process, host = found.groups()
            self._members[int(rank)] = Member(int(rank), host, process=int(process))

    def _submit(self, request: Request) -> None:
        *_, last = request.ready.values()
        self._note_step(request.tensor, request.first)
        self._end_stall(request.tensor, request.first, last)
        for rank, since in request.ready.items():
            self._waiting[rank].add(since, last)
        request.step = self._steps[-1]

    def _note_step(self, name: str, first: float) -> None:
        # As recording.cc.
        if name.startswith(OWN) and self._steps:
            return
        has_room = len(self._names) < MOST_NAMES
        if self._steps and name not in self._names and has_room:
            self._names.add(name)
            return
        self._names = {name}
        # The first step of a later file follows the last one of the file before.
        begin = self._begin or first
        if self._steps:
            begin = max(first, self._steps[-1].begin)
        self._steps.append(_Step(begin))

    def _start(self, request: Request) -> None:
        self._begun = request.batch
        if not request.tensor.startswith(OWN):
            request.step.last_own = max(request.step.last_own, request.own)

    def _end(self, request: Request, end: float, arguments: Mapping[str, Any]) -> None:
        super()._end(request, end, arguments)
        self._busy.add(request.own, end)
        self._bytes.append((end, arguments["bytes"]))
        if arguments.get("failed"):
            text = f"the collective of {request.tensor!r} failed"
            self._add_event(Event(end, "warning", text))

    def _add_phase(self, name: str, begin: float, end: float, moves: bool) -> None:
        if moves:
            self._moving.add(begin, end)
            self._busy.add(begin, end)
        self._spans += 1
        if self._spans >= _SPANS_AT_ONCE:
            self._flush()

    # --- stalls and failures --------------------------------------------------------

    # The ranks that a request waits for come one after the other.
    def _add_missing(self, tensor: str, arguments: Mapping[str, Any]) -> None:
        since, rank = self._time(arguments["since"]), int(arguments["rank"])
        stall = self._stalls.get(tensor)
        if stall is not None and stall.time == since:
            stall.text += f" and rank {rank}"
            return
        stall = Event(since, "stall", f"{tensor!r} waited for rank {rank}")
        self._stalls[tensor] = stall
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
        opened = [each.own for each in self._open.values() if each.batch >= self._begun]
        settled = min([self.last - _SETTLED, *opened])
        over = sum(step.begin <= settled for step in self._steps[1:])
        if over:
            self._add_steps(self._steps[over].begin, over)

    def _add_steps(self, end: float, count: int | None = None) -> None:
        """Adds the first `count` steps, or all, up to `end`."""
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
        waited_for = (self.waits[rank] for rank in range(len(self._waiting)))
        self._add_to_stretches(
            np.column_stack(
                [
                    *(begins, ends, np.ones(len(steps)), passed[: len(steps)]),
                    *(moving.sum(axis=1), waiting.sum(axis=1)),
                    *(moving[:, 1], waiting[:, 1]),
                    *(spans.take(ends) for spans in (*self._waiting, *waited_for)),
                ]
            )
        )

    def _add_to_stretches(self, steps: np.ndarray) -> None:
        """Merges neighbours, so that the stretches do not exceed their limit."""
        numbers = self._steps_added + np.arange(len(steps))
        self._steps_added += len(steps)
        places = np.append(np.arange(len(self._stretches)), numbers // self._steps_each)
        while places[-1] >= _MOST_STRETCHES:
            places //= 2
            self._steps_each *= 2
        rows = np.vstack([self._stretches, steps])
        firsts = np.flatnonzero(np.diff(places, prepend=-1))
        self._stretches = np.add.reduceat(rows, firsts)
        self._stretches[:, 0] = rows[firsts, 0]
        self._stretches[:, 1] = rows[np.append(firsts[1:], len(rows)) - 1, 1]
