"""A rank's part in the recording of its job, from joining the job on."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from keras_hvd.job import basics, cores
from keras_hvd.recording import facts, files
from keras_hvd.recording.epochs import Epochs
from keras_hvd.recording.phases import REST, SAVING, Phases
from keras_hvd.recording.rank_records import RankRecord, RankRecords
from keras_hvd.recording.training_series import TrainingSeries


class Recorder:
    """This rank's part of a recording.

    Args:
        folder: the recording, which `khvdrun` has made on each host.
        place: this rank's number among those of its host.
        record: the first version of its record.
    """

    def __init__(self, folder: Path, place: int, record: RankRecord):
        self.folder = folder
        self.record = record
        self.epoch = basics.epoch()
        self._records = RankRecords(folder / files.RANKS, place)
        self.series = (
            TrainingSeries(folder / files.SERIES) if record.rank == 0 else None
        )
        """On rank 0, samples, loss and phases over time."""
        self.epochs = Epochs(folder / files.EPOCHS) if record.rank == 0 else None
        self.phases = Phases()
        self.sums = (0.0, 0.0, 0.0, 0.0)
        """The latest sums for `series`."""
        purpose = folder / files.SCALING
        self.scaling = purpose.read_text() if purpose.exists() else ""
        """In a job of `khvdrun --scaling`: whether the ranks train, or only meet."""
        self.write()

    def write(self) -> None:
        """Writes `record` to the file."""
        self._records.write(self.record)

    def add_point(self, always: bool) -> None:
        """Adds a point to `series`, if one is due, or always."""
        now = time.monotonic()
        if self.series is not None and (always or self.series.is_due(now)):
            self.series.add(now, self.sums, self.phases.seconds())


_recorder: Recorder | None = None


def current() -> Recorder | None:
    """This rank's recorder; None if the present job is not recorded.

    Example:

    >>> current() is None
    True
    """
    # Some of the processes may form another job, which is not recorded.
    if _recorder is None or _recorder.epoch != basics.epoch():
        return None
    return _recorder


def scaling() -> str:
    """The kind of this job of `khvdrun --scaling`, "train" or "meet"; "" for none.

    It is in the recording and not in a variable: a variable that is left behind would
    make a later job reduce nothing.

    Example:

    >>> scaling()
    ''
    """
    own = current()
    return "" if own is None else own.scaling


def enter(phase: str) -> str:
    """Begins a phase of this rank's time, and returns the one that it ends.

    Example:

    >>> enter(SAVING)  # nothing is recorded
    'rest'
    """
    own = current()
    if own is None:
        return REST
    before = own.phases.enter(phase)
    if phase == REST:
        # Nothing else may follow.
        own.add_point(always=True)
    return before


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Counts the time of this block as saving.

    Example:

    >>> with saving():
    ...     pass
    """
    before = enter(SAVING)
    try:
        yield
    finally:
        enter(before)


def start(
    folder: str,
    rank: int,
    size: int,
    place: int,
    table: Sequence[tuple[str, int | None]],
    capacity: float | None,
) -> None:
    """Begins this rank's part, after the engine's.

    Args:
        folder: the recording.
        rank: this process' rank.
        size: the number of ranks.
        place: its number on its host.
        table: each rank's host and process, if they have met; empty if all are on this
            host.
        capacity: the result of `capacity.measure`.

    Raises:
        OSError: it cannot write to the folder.
    """
    global _recorder
    host = socket.gethostname()
    record = RankRecord(rank, os.getpid(), cores.available(), host=host)
    _recorder = Recorder(Path(folder), place, record)
    if rank == 0:
        members = table or [(host, None)] * size
        facts.write(_recorder.folder / files.FACTS, members, capacity)
