"""A record of each rank of a host and its training, in a file that all of them map.

A rank writes its own record and never waits. `khvdrun` makes the file, and reads it
while the job runs and after its end, even after a crash.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
from pathlib import Path

# A count of the writes, odd during one; then the fields of RankRecord.
_COUNT = struct.Struct("=q")
_FIELDS = struct.Struct("=iiiqqdddd64s64s")
_BYTES = 256
# A writer that was killed in the middle of a write leaves an odd count for ever.
_TRIES = 100


@dataclasses.dataclass
class RankRecord:
    """A rank, and its progress."""

    rank: int
    process: int
    cores: int
    step: int = 0
    """Steps that it has made, in all epochs of all calls of `fit`."""
    epoch: int = 0
    """Of the current `fit`, from 1; 0 before the first."""
    samples: float = math.nan
    """Its own; NaN where unknown, as the next two."""
    samples_per_second: float = math.nan
    loss: float = math.nan
    last_step: float = math.nan
    """When it ended its last step, in seconds since the epoch; NaN before that."""
    host: str = ""
    gpu: str = ""


def create(path: str | os.PathLike[str], ranks: int) -> None:
    """Makes the file for a number of ranks, without their records.

    Example:

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "ranks")
    >>> create(path, 2)
    >>> RankRecords(path, 1).write(RankRecord(rank=1, process=7, cores=2, host="a"))
    >>> [(each.rank, each.process, each.host) for each in read(path)]
    [(1, 7, 'a')]
    """
    Path(path).write_bytes(bytes(_BYTES * ranks))


class RankRecords:
    """The file, for the rank that writes the record at `place`.

    Raises OSError if there is none, or ValueError if it has no such place.
    """

    def __init__(self, path: str | os.PathLike[str], place: int):
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._at = place * _BYTES
        if self._at + _BYTES > len(self._memory):
            raise ValueError(f"{os.fspath(path)!r} has no place {place}")
        self._writes = 0

    def write(self, record: RankRecord) -> None:
        """Replaces the record."""
        *numbers, host, gpu = dataclasses.astuple(record)
        texts = (each.encode()[:64] for each in (host, gpu))
        _COUNT.pack_into(self._memory, self._at, self._writes + 1)
        _FIELDS.pack_into(self._memory, self._at + _COUNT.size, *numbers, *texts)
        self._writes += 2
        _COUNT.pack_into(self._memory, self._at, self._writes)


def read(path: str | os.PathLike[str]) -> list[RankRecord]:
    """The records of those ranks that have written one, in their order."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return []
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with memory:
        found = [_read(memory, at) for at in range(0, len(memory), _BYTES)]
    return [record for record in found if record is not None]


def _read(memory: mmap.mmap, at: int) -> RankRecord | None:
    for _ in range(_TRIES):
        (before,) = _COUNT.unpack_from(memory, at)
        values = _FIELDS.unpack_from(memory, at + _COUNT.size)
        (after,) = _COUNT.unpack_from(memory, at)
        if before == after and before % 2 == 0:
            break
    if before == 0:
        return None
    *numbers, host, gpu = values
    texts = (each.rstrip(b"\0").decode(errors="replace") for each in (host, gpu))
    return RankRecord(*numbers, *texts)
