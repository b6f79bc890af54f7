"""Reads the recording that a job's ranks make for `khvdrun --report`.

A recording is a folder. Rank 0's engine writes the times (tf_ops/timeline). Rank 0
writes the samples and the facts, each rank of its host its own record, and `khvdrun`
the command. It can be read while the job runs, and after its end, even after a crash.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from keras_hvd.recording import epochs, facts, files, rank_records, training_series
from keras_hvd.recording.phases import PHASES
from keras_hvd.recording.rank_records import RankRecord
from keras_hvd.report.record import Event, Intervals, JobRecord, Member, Tensor
from keras_hvd.timeline import events

# The layout of RecordingFile (tf_ops/timeline/recording_file.h).
_MAGIC = b"khvdrec1"
_HEADER = struct.Struct("=8s6iqd10q")
_HEADER_BYTES = 4096
_TENSOR = np.dtype([("name", "S128"), ("values", "=f8", 5)])
_EVENT = np.dtype([("time", "=f8"), ("text", "S248")])
_SUMS = 8
# The column of the series that has the time in steps.
_IN_STEPS = 5


_DAMAGE = (*events.DAMAGE, MemoryError, struct.error)
_MOST_RANKS = 1 << 20


class NotARecordingError(ValueError):
    """keras_hvd has not written this folder, or rank 0 has not joined the job yet."""


@dataclasses.dataclass
class Waits:
    """The ranks' waits so far, in seconds from the first step on."""

    seconds: float
    """From the first step to the last that is recorded."""
    waits: list[float]
    """For each rank, the time in which it waited, as `record.WAITING` says."""
    waited_for: list[float]
    """For each rank, the time in which it kept all others waiting."""

    def since(self, earlier: Waits) -> Waits:
        """The waits after `earlier`.

        Example:

        >>> Waits(3, [2, 0], [0, 2]).since(Waits(1, [1, 0], [0, 1]))
        Waits(seconds=2, waits=[1, 0], waited_for=[0, 1])
        """
        return Waits(
            self.seconds - earlier.seconds,
            [now - then for now, then in zip(self.waits, earlier.waits)],
            [now - then for now, then in zip(self.waited_for, earlier.waited_for)],
        )


def read(path: str | os.PathLike[str]) -> JobRecord:
    """Reads a recording.

    Args:
        path: The folder.

    Returns:
        The job's record, without its end, which only `khvdrun` knows.

    Raises:
        NotARecordingError: This is not a recording, it has nothing yet, or it is
            damaged.
        OSError: It cannot be read.

    Example:

    >>> read("/dev")
    Traceback (most recent call last):
    keras_hvd.report.recording.NotARecordingError: '/dev' is no recording of keras_hvd
    """
    folder = Path(path)
    try:
        return _read(folder)
    except _DAMAGE as error:
        if isinstance(error, NotARecordingError):
            raise
        raise NotARecordingError(
            f"the recording {str(folder)!r} is damaged ({type(error).__name__}: "
            f"{error})"
        ) from None


def _read(folder: Path) -> JobRecord:
    times = _Times(folder)
    known = facts.read(folder / files.FACTS)
    ranks = _read_if_there(rank_records.read, folder / files.RANKS, [])
    series = _read_if_there(
        training_series.read,
        folder / files.SERIES,
        np.zeros((0, training_series.COLUMNS)),
    )
    series = series[np.isfinite(series).all(axis=1)]
    # A job of `khvdrun --scaling` meets in its steps, also if it is of one rank.
    is_alone = times.size == 1 and not (folder / files.SCALING).exists()
    return JobRecord(
        size=times.size,
        begin=times.begin,
        seconds=times.seconds,
        intervals=(_alone if is_alone else _intervals)(times, series),
        tensors=times.tensors(),
        events=times.events(),
        members=_members(times.size, known.get("members", []), ranks),
        settings=known.get("settings", {}),
        command=_read_if_there(_text, folder / files.COMMAND, ""),
        ended="was killed, or still runs: the recording has no end",
        left_out=times.left_out,
        epochs=_read_if_there(epochs.read, folder / files.EPOCHS, []),
        phases=dict(zip(PHASES, series[-1, -len(PHASES) :])) if len(series) else {},
        capacity=None if any(rank.gpu for rank in ranks) else known.get("capacity"),
    )


def waits(path: str | os.PathLike[str]) -> Waits:
    """The ranks' waits so far.

    Raises NotARecordingError or OSError, as `read`.
    """
    return _Times(Path(path), only_totals=True).waits()


class _Times:
    """The file of rank 0's engine."""

    def __init__(self, folder: Path, only_totals: bool = False):
        try:
            with (folder / files.TIMES).open("rb") as file:
                header = file.read(_HEADER_BYTES)
                if header[: len(_MAGIC)] != _MAGIC:
                    raise FileNotFoundError
                self._read_header(header)
                if only_totals:
                    file.seek(self._totals_at)
                    self._totals = np.frombuffer(file.read(8 * self._numbers))
                    return
                rest = file.read()
        except (FileNotFoundError, NotADirectoryError):
            message = f"{str(folder)!r} is no recording of keras_hvd"
            raise NotARecordingError(message) from None
        self._data = header + rest

    def _read_header(self, header: bytes) -> None:
        fields = _HEADER.unpack_from(header)
        self.size, self._columns, self._in_column = fields[1:4]
        if not 0 < self.size <= _MOST_RANKS:
            raise ValueError(f"{self.size} is no number of ranks")
        stretches, tensor_room, event_room = fields[4:7]
        self.started, self.begin = 1e-9 * fields[7], fields[8]
        self.seconds, self.left_out = 1e-9 * fields[9], fields[10]
        self._tensors, self._events, self.events_left_out, active = fields[11:15]
        self._stretches = fields[15 + 2 * active]
        self._numbers = _SUMS + 2 * self._columns
        self._events_at = _HEADER_BYTES + tensor_room * _TENSOR.itemsize
        self._totals_at = self._events_at + event_room * _EVENT.itemsize
        self._rows_at = self._totals_at + 8 * (1 + active * stretches) * self._numbers

    def rows(self) -> np.ndarray:
        """A row for each stretch: its sums, waits, and waits for each."""
        count = self._stretches * self._numbers
        numbers = np.frombuffer(self._data, "=f8", count, self._rows_at)
        return numbers.reshape(-1, self._numbers)

    def by_rank(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The waits in some rows, and the waits for each, by rank."""
        both = rows[..., _SUMS : _SUMS + self._columns], rows[..., -self._columns :]
        every, waited_for = (
            np.repeat(each, self._in_column, axis=-1)[..., : self.size] for each in both
        )
        return every, waited_for

    def waits(self) -> Waits:
        begin, end, *_ = self._totals.tolist()
        every, waited_for = self.by_rank(self._totals)
        return Waits(end - begin, every.tolist(), waited_for.tolist())

    def tensors(self) -> list[Tensor]:
        found = np.frombuffer(self._data, _TENSOR, self._tensors, _HEADER_BYTES)
        return [
            Tensor(name.decode(errors="replace"), int(times), int(size), *seconds)
            for name, values in found.tolist()
            for times, size, *seconds in [values.tolist()]
            if times > 0
        ]

    def events(self) -> list[Event]:
        found = np.frombuffer(self._data, _EVENT, self._events, self._events_at)
        stalls = [
            Event(time, "stall", text.decode(errors="replace"))
            for time, text in found.tolist()
        ]
        if self.events_left_out:
            text = f"{self.events_left_out} later stalls are left out"
            stalls.append(Event(stalls[-1].time, "stall", text))
        return stalls


def _intervals(times: _Times, series: np.ndarray) -> Intervals:
    rows = times.rows()
    begin, end = rows[:, 0], rows[:, 1]
    samples = loss = np.full(len(rows), np.nan)
    outside = np.zeros(len(rows))
    if len(series):
        in_steps = _grown(series, _IN_STEPS, times, begin, end)
        outside = np.maximum(end - begin - in_steps, 0)
    # A train_step that leaves Keras' tracker of the loss alone counts no samples.
    if len(series) and series[-1, 1] > 0:
        samples, lost, counted = (
            _grown(series, column, times, begin, end) for column in (1, 2, 3)
        )
        loss = _means(lost, counted, least=1e-9)
    sums, waits = rows[:, :_SUMS].T, times.by_rank(rows)
    return Intervals(*(*sums, *waits, samples, loss, outside))


def _grown(
    series: np.ndarray, column: int, times: _Times, begin: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """The growth of a column of the series in each stretch."""
    moments, sums = series[:, 0] - times.started, series[:, column]
    return np.interp(end, moments, sums) - np.interp(begin, moments, sums)


def _alone(times: _Times, series: np.ndarray) -> Intervals:
    """The intervals of a job of one rank, whose engine reduces no gradients."""
    begin = series[:-1, 0] - times.started
    seconds, samples, lost, counted, steps, in_steps = np.diff(series, axis=0)[:, :6].T
    samples, loss = np.where(counted > 0, samples, np.nan), _means(lost, counted)
    nothing = [np.zeros(len(steps))] * 5 + [np.zeros((len(steps), 1))] * 2
    own = samples, loss, np.maximum(seconds - in_steps, 0)
    return Intervals(*(begin, begin + seconds, steps, *nothing, *own))


def _means(sums: np.ndarray, counts: np.ndarray, least: float = 0.0) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(counts > least, sums / counts, np.nan)


def _members(
    size: int, known: list[tuple[str, int | None]], records: list[RankRecord]
) -> list[Member]:
    members = [Member(rank, None) for rank in range(size)]
    for member, (host, process) in zip(members, known):
        member.host, member.process = host, process
    for each in records:
        if each.rank < size:
            own = each.rank, each.host, each.cores, each.gpu or None, each.process
            members[each.rank] = Member(*own)
    return members


def _read_if_there(read: Callable[[Path], Any], path: Path, otherwise: Any) -> Any:
    try:
        return read(path)
    except FileNotFoundError:
        return otherwise


def _text(path: Path) -> str:
    return path.read_text(errors="replace")
