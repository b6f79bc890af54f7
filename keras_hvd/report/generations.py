"""The reports of a job whose ranks went on in others, each of which is a generation.

A recording has a folder for each of the later ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from keras_hvd.recording import files
from keras_hvd.report import page, recording
from keras_hvd.report.record import Event, JobRecord

_MOST_NAMED = 5


class Generations:
    """The records of all generations that have one.

    Args:
        records: by their numbers, from 1.
        count: how many there were.
    """

    def __init__(self, records: Mapping[int, JobRecord], count: int):
        self._records = records
        self._count = count
        for number, record in records.items() if count > 1 else ():
            record.generation = f"{number} of {count}"
            if number < count:
                record.ended = f"went on as generation {number + 1}"

    def end(self, ended: str, events: Iterable[tuple[float, str, str]]) -> None:
        """Adds the end of the last one, and events of all.

        Args:
            ended: as a clause after "The job".
            events: the time (`time.time`), the kind and the text of each.
        """
        if self._count in self._records:
            self._records[self._count].ended = ended
        for at, kind, text in events:
            record = self._record_at(at)
            record.events.append(Event(max(0.0, at - record.begin), kind, text))
        for record in self._records.values():
            record.events.sort(key=lambda event: event.time)

    def _record_at(self, at: float) -> JobRecord:
        """The latest one that had begun by then."""
        first, *later = self._records.values()
        begun = [record for record in later if record.begin <= at]
        return begun[-1] if begun else first

    def write(self, path: str) -> str:
        """Writes a page for each, and returns a line that tells where they are.

        Args:
            path: the page of the first one; the others' have their numbers in it.

        Raises:
            OSError: one cannot be written.
        """
        names = []
        for number, record in self._records.items():
            names.append(files.of_generation(path, number))
            page.write(record, names[-1])
        if self._count == 1:
            return f"the report is in {path!r}"
        return f"the reports of {self._count} generations are in {_listed(names)}" + (
            self._what_is_missing()
        )

    def _what_is_missing(self) -> str:
        missing = [n for n in range(1, self._count + 1) if n not in self._records]
        if not missing:
            return ""
        return (
            f"; there is none of {', '.join(map(str, missing))}, where rank 0 was on "
            "another host, or ended too early"
        )


def _listed(names: Sequence[str]) -> str:
    """The names; of many, the first and the last ones."""
    if len(names) > _MOST_NAMED:
        return f"{names[0]!r}, {names[1]!r} and so on to {names[-1]!r}"
    return ", ".join(map(repr, names))


def read(path: str | os.PathLike[str]) -> Generations:
    """Reads a recording, with all its generations.

    Args:
        path: the folder.

    Raises:
        NotARecordingError: this is not a recording, no generation has anything yet, or
            the first one is damaged.
        OSError: it cannot be read.

    Example:

    >>> read("/dev")
    Traceback (most recent call last):
    keras_hvd.report.recording.NotARecordingError: '/dev' is no recording of keras_hvd
    """
    folder = Path(path)
    later = {}
    for file in folder.glob(f"*/{files.GENERATION}"):
        with contextlib.suppress(ValueError):
            later[int(file.read_text())] = file.parent
    records = {}
    for number, each in sorted(later.items()):
        with contextlib.suppress(recording.NotARecordingError):
            records[number] = recording.read(each)
    try:
        records = {1: recording.read(folder), **records}
    except recording.NotARecordingError:
        if not records:
            raise
    return Generations(records, max(later, default=1))
