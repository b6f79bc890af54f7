"""Summarizes a timeline: phases, slowest tensors, and the rank that others wait for."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keras_hvd.timeline import events
from keras_hvd.timeline.events import NotATimelineError
from keras_hvd.timeline.spans import Spans

SLOWEST = 10
"""Number of tensors in the list of the slowest."""

MOST_NAMES = 16384
"""The writer knows the rows of this many names (tf_ops/timeline/timeline_writer.cc)."""

OWN = "keras_hvd/"
"""The beginning of names that keras_hvd gives to what it exchanges by itself."""

# The file does not use a row again once this many new ones have come since then.
_MOST_ROWS = 4 * MOST_NAMES
# The most arrivals on a line of the file.
_MOST_ARRIVALS = 64
_NOT_MOVING = "WAIT_FOR_RANKS", "WAIT_FOR_INPUTS"


@dataclasses.dataclass
class Request:
    """A request, from its decision on."""

    tensor: str
    batch: int
    ready: dict[int, float]  # when each rank submitted it, in this order
    first: float
    decided: float
    began: float
    step: Any = None  # for a summary of steps

    @property
    def own(self) -> float:
        """The time at which rank 0 submitted it."""
        if len(self.ready) == _MOST_ARRIVALS:
            return self.ready.get(0, self.first)
        # Rank 0 had joined before and gives zeros, or the others do this without it.
        return self.ready.get(0, self.decided)


@dataclasses.dataclass
class Tensor:
    """The time of a tensor's requests that have ended."""

    requests: int = 0
    bytes: int = 0
    negotiating: float = 0.0  # from first submissions to last ones
    deciding: float = 0.0  # from there to decisions
    queued: float = 0.0
    running: float = 0.0

    @property
    def phases(self) -> tuple[float, float, float]:
        """The time until decisions, in the queue, and in collectives."""
        return self.negotiating + self.deciding, self.queued, self.running

    @property
    def total(self) -> float:
        """From first submissions to ends."""
        return sum(self.phases)


class Summary:
    """The sums over timelines. Times are in `unit` microseconds.

    A report adds up more (report/timelines.py), in methods of its own.
    """

    unit = 1.0
    most_tensors = math.inf  # the most tensors with sums of their own

    def __init__(self) -> None:
        self.began = 0.0  # when the file did, in seconds since the epoch
        self.size = 0  # number of ranks
        self.is_whole = False  # whether keras_hvd ended the file
        self.first = math.inf
        self.last = self.marked = 0.0  # end of a span, and time of a mark
        self.phases: dict[str, Spans] = defaultdict(Spans)
        self.tensors: dict[str, Tensor] = defaultdict(Tensor)
        # For each rank, when others waited for it alone.
        self.waits: dict[int, Spans] = defaultdict(Spans)
        # For each rank, the number of requests that it submitted last.
        self.was_last: dict[int, int] = defaultdict(int)
        # For each tensor that still waited at the end, the missing ranks.
        self.missing: dict[str, list[str]] = defaultdict(list)
        self.not_recorded = 0  # requests that the timeline had no room for
        self.unreadable = 0  # damaged lines, except an incomplete last line

    def add(self, lines: Iterable[str]) -> None:
        """Adds a file, which follows the earlier ones."""
        self._begin = self.last
        self._rows: dict[int, str] = {}
        self._open: dict[int, Request] = {}
        self._latest: dict[str, tuple[int, float, float]] = {}
        self.is_whole, unreadable = events.read(lines, self._add)
        self.unreadable += unreadable

    def _add(self, event: Mapping[str, Any]) -> None:
        kind, name = event["ph"], event["name"]
        if event.get("pid") == events.OTHER_HOSTS:
            if name == "thread_name":
                self._add_host(event["args"]["name"])
            return
        if kind == "i":
            self.marked = max(self.marked, self._time(event["ts"]))
        if kind == "X":
            self._add_span(name, event)
        elif name == "start":
            self.began = float(event["args"]["time"])
            self.size = int(event["args"]["size"])
        elif name == "thread_name":
            names = event["args"]
            self._rows[event["tid"]] = names.get("tensor", names["name"])
            self._rows.pop(event["tid"] - _MOST_ROWS, None)
        elif name == "NOT_RECORDED":
            self.not_recorded += event["args"]["requests"]
        elif name == "WAITING_FOR_RANK":
            self._add_missing(self._rows[event["tid"]], event["args"])

    def _time(self, microseconds: float) -> float:
        return self._begin + self.unit * microseconds

    def _add_host(self, leader: str) -> None:
        pass

    def _add_missing(self, tensor: str, arguments: Mapping[str, Any]) -> None:
        self.missing[tensor].append(str(arguments["rank"]))

    def _add_span(self, name: str, event: Mapping[str, Any]) -> None:
        row, arguments = event["tid"], event["args"]
        begin, batch = self._time(event["ts"]), arguments["batch"]
        end = begin + self.unit * event["dur"]
        span = batch, begin, end
        is_repeated = moves = False
        if name.startswith("NEGOTIATE_"):
            ready = self._add_arrivals(begin, arguments["ready"])
            request = Request(self._rows[row], batch, ready, begin, end, end)
            self._submit(request)
            self._open[row] = request
        elif name == "QUEUE":
            # Of a request whose first line is damaged, only the phases are known.
            if row in self._open:
                self._open[row].began = end
                self._start(self._open[row])
        else:
            # Every tensor of a batch has the batch's shared phases in its row.
            is_repeated = self._latest.get(name) == span
            self._latest[name] = span
            if "requests" not in arguments:
                moves = name not in _NOT_MOVING
            elif row in self._open:
                self._end(self._open.pop(row), end, arguments)
        self.last = max(self.last, end)
        if not is_repeated:
            self._add_phase(name, begin, end, moves)

    def _add_arrivals(
        self, first: float, late: Mapping[str, float]
    ) -> dict[int, float]:
        times = sorted((self.unit * time, int(rank)) for rank, time in late.items())
        if len(times) > 1:
            *_, (before, _), (last, rank) = times
            self.was_last[rank] += 1
            self.waits[rank].add(first + before, first + last)
        return {rank: first + time for time, rank in times}

    def _submit(self, request: Request) -> None:
        self.missing.pop(request.tensor, None)

    def _start(self, request: Request) -> None:
        pass

    def _end(self, request: Request, end: float, arguments: Mapping[str, Any]) -> None:
        name = request.tensor
        if name not in self.tensors and len(self.tensors) >= self.most_tensors - 1:
            name = "(all other tensors)"
        tensor = self.tensors[name]
        *_, last = request.ready.values()
        tensor.requests += 1
        tensor.bytes += arguments.get("bytes", 0)
        tensor.negotiating += last - request.first
        tensor.deciding += request.decided - last
        tensor.queued += request.began - request.decided
        tensor.running += end - request.began

    def _add_phase(self, name: str, begin: float, end: float, moves: bool) -> None:
        self.first = min(self.first, begin)
        self.phases[name].add(begin, end)


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
    summary = Summary()
    summary.add(lines)
    if summary.size == 0:
        raise NotATimelineError("this is not a timeline of keras_hvd")
    return summary


def _without_controls(name: str) -> str:
    r"""A tensor's name, escaped so that no part of it acts on the terminal.

    Example:

    >>> print(_without_controls("grad\x1b[31m"))
    grad\x1b[31m
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in name
    )


def text(summary: Summary) -> str:
    """Formats a summary for people.

    Example:

    >>> print(text(read(['{"name":"start","ph":"M","args":{"time":0,"size":2}}'])))
    2 ranks; the file ends early: the job was killed, or still runs
    no collective was recorded
    """
    early = "; the file ends early: the job was killed, or still runs"
    ended = "" if summary.is_whole else early
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


# Phases within a collective come below it; phases on the GPU come last.
_COLLECTIVES = ("SHARED_MEMORY_", "ENQUEUE_")
_PARTS = ("COPY_IN", "WAIT_FOR_RANKS", "EXCHANGE", "REDUCE", "COPY_OUT")
_ON_GPU = ("WAIT_FOR_INPUTS", "NCCL_", "COPY_TO_HOST", "COPY_TO_GPU", "COPY_ON_GPU")


def _phases(summary: Summary) -> str:
    whole = max(summary.last - summary.first, 1e-9)
    rows = []

    def order(name: str) -> tuple[int, str]:
        starts = ("NEGOTIATE_", "QUEUE", *_COLLECTIVES, *_PARTS, *_ON_GPU)
        places = [i for i, start in enumerate(starts) if name.startswith(start)]
        return (places or [len(starts)])[0], name

    for name in sorted(summary.phases, key=order):
        durations = summary.phases[name].durations()
        covered = summary.phases[name].covered()
        shown = ("  " if name in _PARTS else "") + name
        times = map(_time, (durations.mean(), durations.max(), covered))
        rows.append((shown, str(len(durations)), *times, f"{covered / whole:.1%}"))
    return _table(("phase", "times", "mean", "longest", "all", "of the time"), rows)


def _slowest(summary: Summary) -> str:
    slowest = sorted(
        summary.tensors.items(), key=lambda item: -item[1].total / item[1].requests
    )[:SLOWEST]
    rows = []
    for name, tensor in slowest:
        means = [each / tensor.requests for each in (tensor.total, *tensor.phases)]
        shown = _without_controls(name), str(tensor.requests)
        rows.append((*shown, *map(_time, means)))
    parts = "negotiate", "queue", "collective"
    return _table(("slowest tensors", "times", "mean", *parts), rows)


def _waits(summary: Summary) -> str:
    covered = ((spans.covered(), rank) for rank, spans in summary.waits.items())
    waited = sorted(covered, reverse=True)
    if not waited:
        return "no rank waited for another"
    total = sum(summary.was_last.values())
    rows = [
        (f"rank {rank}", _time(time), f"{summary.was_last[rank]}/{total}")
        for time, rank in waited[:SLOWEST]
    ]
    first = f"the others waited most for rank {waited[0][1]}: {_time(waited[0][0])}"
    return f"{first}\n{_table(('waited for', 'time', 'was last'), rows)}"


def _unfinished(summary: Summary) -> list[str]:
    return [
        f"{_without_controls(name)} was still waiting for rank {', '.join(ranks)}"
        for name, ranks in summary.missing.items()
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (max(map(len, column)) for column in zip(head, *rows))
    layout = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return "\n".join(layout.format(*row).rstrip() for row in (head, *rows))


def _time(microseconds: float) -> str:
    """Formats a time."""
    for unit, factor in (("us", 1), ("ms", 1e3)):
        if microseconds < 1e3 * factor:
            return f"{microseconds / factor:.3g} {unit}"
    return f"{microseconds / 1e6:.4g} s"
