"""Samples, loss and phases over time: a mapped file of fixed size, which rank 0 writes.

When the file is full, every second point is left out, and from then on points are twice
as far apart. The points are copied to a second table first. It then takes the place of
the first, so a reader never meets a half-done change.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from keras_hvd.recording.phases import PHASES

POINTS = 4096
"""The most points that the file holds."""

_MOST_OFTEN_SECONDS = 0.2
COLUMNS = 5 + len(PHASES)
"""The numbers of a point."""

# The table in use, and the number of points in each.
_HEADER = 3
_NUMBERS = _HEADER + 2 * POINTS * COLUMNS


class TrainingSeries:
    """The file, for rank 0: an existing one is overwritten.

    Example:

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     series = TrainingSeries(file.name)
    ...     for time in range(10000):
    ...         sums = 32 * time, 0.5 * 32 * time, 32 * time, time
    ...         series.add(time, sums, [time, 0, 0, 0, 0, 0])
    ...     points = read(file.name)
    >>> len(points) <= POINTS, points[1].tolist()
    (True, [8.0, 256.0, 128.0, 256.0, 8.0, 8.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    """

    def __init__(self, path: str | os.PathLike[str]):
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 8 * _NUMBERS)
        self._header, self._tables = _parts(np.memmap(path, np.float64, "r+"))
        self._apart = _MOST_OFTEN_SECONDS
        self._last = -np.inf

    def is_due(self, time: float) -> bool:
        """Whether a point at this time would be kept, because it is late enough."""
        return time - self._last >= self._apart

    def add(
        self,
        time: float,
        sums: tuple[float, float, float, float],
        phases: Sequence[float],
    ) -> None:
        """Adds a point: all are sums from the beginning of the job.

        Args:
            time: in seconds, of `time.monotonic`.
            sums: samples of all ranks, rank 0's loss (the sum over its samples), its
                samples, and its steps.
            phases: its seconds in each of `PHASES`.
        """
        active = int(self._header[0])
        count = int(self._header[1 + active])
        if count == POINTS:
            kept = self._tables[active][::2]
            active = 1 - active
            count = len(kept)
            self._tables[active][:count] = kept
            self._header[1 + active] = count
            self._header[0] = active
            self._apart *= 2
        self._tables[active][count] = time, *sums, *phases
        self._header[1 + active] = count + 1
        self._last = time


def read(path: str | os.PathLike[str]) -> np.ndarray:
    """The points: float64, a row each, as given to `TrainingSeries.add`."""
    numbers = np.fromfile(path, np.float64)
    if len(numbers) != _NUMBERS:
        return np.zeros((0, COLUMNS))
    header, tables = _parts(numbers)
    active = int(header[0])
    return tables[active][: int(header[1 + active])].copy()


def _parts(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    header, rest = numbers[:_HEADER], numbers[_HEADER:]
    return header, rest.reshape(2, POINTS, COLUMNS)
