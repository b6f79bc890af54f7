"""Summarizes a timeline: phases, slowest tensors, and the rank that others wait for."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_hvd.timeline import events
from keras_hvd.timeline.events import NotATimelineError

SLOWEST = 10
"""Number of tensors in the list of the slowest."""


@dataclass
class Spans:
    """Stretches of time, in microseconds."""

    begins: array = field(default_factory=lambda: array("d"))
    ends: array = field(default_factory=lambda: array("d"))

    def add(self, begin: float, end: float) -> None:
        self.begins.append(begin)
        self.ends.append(end)

    def durations(self) -> np.ndarray:
        """How long each took: microseconds, float64 of shape (count,)."""
        return np.subtract(self.ends, self.begins)

    def covered(self) -> float:
        """Microseconds in which there was at least one of them.

        Example:

        >>> spans = Spans()
        >>> spans.add(0, 3); spans.add(2, 5); spans.add(10, 11)
        >>> spans.covered()
        6.0
        """
        begins, ends = np.array(self.begins), np.array(self.ends)
        order = np.argsort(begins)
        begins, ends = begins[order], ends[order]
        reached = np.maximum.accumulate(np.concatenate([[-np.inf], ends]))[:-1]
        return float(np.maximum(ends - np.maximum(begins, reached), 0).sum())


@dataclass
class Tensor:
    """The time of a tensor's requests, in microseconds."""

    requests: int = 0  # that have ended
    total: float = 0  # from first submissions to ends
    # The same by phase: negotiation, queue, collective.
    by_phase: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass
class Summary:
    """What a timeline shows. Times are in microseconds."""

    size: int = 0  # number of ranks
    is_whole: bool = False  # whether keras_hvd ended the file
    first: float = float("inf")
    last: float = 0
    phases: dict[str, Spans] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # For each rank, when others waited for it alone.
    waits: dict[int, Spans] = field(default_factory=dict)
    # For each rank, how many requests it submitted last.
    was_last: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    # For each tensor that still waited at the end, the missing ranks.
    missing: dict[str, list[int]] = field(default_factory=dict)
    not_recorded: int = 0  # requests that the timeline had no room for
    unreadable: int = 0  # damaged lines, except an incomplete last line


def read(lines: Iterable[str]) -> Summary:
    """Reads a timeline. Raises NotATimelineError if it is not one.

    Example:

    >>> summary = read([
    ...     '[',
    ...     '{"name":"start","ph":"M","args":{"time":0,"size":2}},',
    ...     '{"name":"thread_name","ph":"M","tid":0,"args":{"name":"grad"}},',
    ...     '{"name":"NEGOTIATE_ALLREDUCE","ph":"X","tid":0,"ts":0,"dur":9,'
    ...     '"args":{"batch":1,"ready":{"1":0,"0":8}}}'])
    >>> summary.size, summary.is_whole, summary.waits[0].covered()
    (2, False, 8.0)
    """
    reader = _Reader()
    reader.summary.is_whole, reader.summary.unreadable = events.read(lines, reader.add)
    if reader.summary.size == 0:
        raise NotATimelineError("this is not a timeline of keras_hvd")
    return reader.summary


def _without_controls(name: str) -> str:
    r"""A tensor's name, in which nothing acts on the terminal.

    Example:

    >>> print(_without_controls("grad\x1b[31m"))
    grad\x1b[31m
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in name
    )


class _Reader:
    """Reads the events in the order of the file."""

    def __init__(self):
        self.summary = Summary()
        self._rows: dict[int, str] = {}
        self._open: dict[int, dict[str, float]] = defaultdict(dict)
        self._last_of_batch: dict[str, tuple[int, float]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        if event.get("pid") == events.OTHER_HOSTS:
            return
        if event["ph"] == "X":
            self._add_span(event)
        elif event["name"] == "start":
            self.summary.size = int(event["args"]["size"])
        elif event["name"] == "thread_name":
            names = event["args"]
            tensor = names.get("tensor", names["name"])
            self._rows[event["tid"]] = _without_controls(tensor)
        elif event["name"] == "NOT_RECORDED":
            self.summary.not_recorded += event["args"]["requests"]
        elif event["name"] == "WAITING_FOR_RANK":
            tensor = self._rows[event["tid"]]
            self.summary.missing.setdefault(tensor, []).append(event["args"]["rank"])

    def _add_span(self, event: Mapping[str, Any]) -> None:
        summary, name, row = self.summary, event["name"], event["tid"]
        begin, batch = float(event["ts"]), event["args"]["batch"]
        end = begin + float(event["dur"])
        summary.first = min(summary.first, begin)
        summary.last = max(summary.last, end)
        # Every tensor of a batch has the batch's shared phases in its row.
        is_repeated = self._last_of_batch.get(name) == (batch, begin)
        self._last_of_batch[name] = (batch, begin)
        if name.startswith("NEGOTIATE_"):
            self._open[row] = {"negotiate": event["dur"]}
            self._add_arrivals(begin, event["args"]["ready"])
            summary.missing.pop(self._rows[row], None)
            is_repeated = False
        elif name == "QUEUE":
            self._open[row]["queue"] = event["dur"]
            is_repeated = False
        elif "requests" in event["args"]:
            self._open[row]["collective"] = event["dur"]
            self._end(row)
        if not is_repeated:
            summary.phases.setdefault(name, Spans()).add(begin, end)

    def _add_arrivals(self, begin: float, ready: Mapping[str, float]) -> None:
        if len(ready) < 2:
            return
        *_, (before, _), (last, rank) = sorted(
            (time, int(rank)) for rank, time in ready.items()
        )
        self.summary.was_last[rank] += 1
        self.summary.waits.setdefault(rank, Spans()).add(begin + before, begin + last)

    def _end(self, row: int) -> None:
        tensor = self.summary.tensors.setdefault(self._rows[row], Tensor())
        parts = self._open.pop(row)
        tensor.requests += 1
        tensor.total += sum(parts.values())
        for phase, duration in parts.items():
            tensor.by_phase[phase] += duration


def text(summary: Summary) -> str:
    """Formats a summary for people.

    Example:

    >>> print(text(Summary(size=2)))
    2 ranks; the file ends early: the job was killed, or still runs
    no collective was recorded
    """
    ended = "" if summary.is_whole else _ENDS_EARLY
    lines = [f"{summary.size} ranks{ended}"]
    if summary.not_recorded:
        lines.append(f"not recorded for lack of room: {summary.not_recorded} requests")
    if summary.unreadable:
        lines.append(f"skipped as damaged: {summary.unreadable} lines of the file")
    if not summary.phases:
        return "\n".join([*lines, "no collective was recorded", *_unfinished(summary)])
    lines[0] = f"{_time(summary.last - summary.first)} recorded, " + lines[0]
    parts = [_phases(summary), _slowest(summary), _waits(summary)]
    return "\n\n".join(["\n".join(lines), *parts, *_unfinished(summary)])


_ENDS_EARLY = "; the file ends early: the job was killed, or still runs"

# Phases within a collective come below it; phases on the GPU come last.
_COLLECTIVES = ("SHARED_MEMORY_", "ENQUEUE_")
_PARTS = ("COPY_IN", "WAIT_FOR_RANKS", "EXCHANGE", "REDUCE", "COPY_OUT")
_ON_GPU = ("WAIT_FOR_INPUTS", "NCCL_", "COPY_TO_HOST", "COPY_TO_GPU", "COPY_ON_GPU")


def _phases(summary: Summary) -> str:
    whole = max(summary.last - summary.first, 1e-9)
    rows: list[tuple[str, ...]]
    rows = [("phase", "times", "mean", "longest", "all", "of the time")]

    def order(name: str) -> tuple[int, str]:
        starts = ("NEGOTIATE_", "QUEUE", *_COLLECTIVES, *_PARTS, *_ON_GPU)
        places = [i for i, start in enumerate(starts) if name.startswith(start)]
        return (places or [len(starts)])[0], name

    for name in sorted(summary.phases, key=order):
        durations = summary.phases[name].durations()
        covered = summary.phases[name].covered()
        rows.append(
            (
                ("  " if name in _PARTS else "") + name,
                str(len(durations)),
                _time(durations.mean()),
                _time(durations.max()),
                _time(covered),
                f"{covered / whole:.1%}",
            )
        )
    return _table(rows)


def _slowest(summary: Summary) -> str:
    slowest = sorted(
        summary.tensors.items(), key=lambda item: -item[1].total / item[1].requests
    )[:SLOWEST]
    parts = ("negotiate", "queue", "collective")
    rows: list[tuple[str, ...]]
    rows = [("slowest tensors", "times", "mean", *parts)]
    for name, tensor in slowest:
        means = [_time(tensor.by_phase[part] / tensor.requests) for part in parts]
        mean = _time(tensor.total / tensor.requests)
        rows.append((name, str(tensor.requests), mean, *means))
    return _table(rows)


def _waits(summary: Summary) -> str:
    waited = sorted(
        ((spans.covered(), rank) for rank, spans in summary.waits.items()), reverse=True
    )
    if not waited:
        return "no rank waited for another"
    total = sum(summary.was_last.values())
    rows: list[tuple[str, ...]]
    rows = [("waited for", "time", "was last")]
    for time, rank in waited[:SLOWEST]:
        rows.append((f"rank {rank}", _time(time), f"{summary.was_last[rank]}/{total}"))
    first = f"the others waited most for rank {waited[0][1]}: {_time(waited[0][0])}"
    return f"{first}\n{_table(rows)}"


def _unfinished(summary: Summary) -> list[str]:
    return [
        f"{name} was still waiting for rank {', '.join(map(str, ranks))}"
        for name, ranks in summary.missing.items()
    ]


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        ).rstrip()
        for row in rows
    )


def _time(microseconds: float) -> str:
    """Formats a time."""
    for unit, factor in (("us", 1), ("ms", 1e3)):
        if microseconds < 1e3 * factor:
            return f"{microseconds / factor:.3g} {unit}"
    return f"{microseconds / 1e6:.4g} s"
