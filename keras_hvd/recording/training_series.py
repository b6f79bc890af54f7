"""Samples and loss over time: a mapped file of fixed size, which rank 0 writes.

When the file is full, every second point is left out, and from then on points are twice
as far apart. The points are copied to a second table first. It then takes the place of
the first, so a reader never meets a half-done change.
"""

from __future__ import annotations

import os

import numpy as np

POINTS = 4096
"""The most points that the file holds."""

_MOST_OFTEN_SECONDS = 0.2
_COLUMNS = 5
# The table in use, and the number of points in each.
_HEADER = 3
_NUMBERS = _HEADER + 2 * POINTS * _COLUMNS


class TrainingSeries:
    """The file, for rank 0: an existing one is overwritten.

    Example:

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     series = TrainingSeries(file.name)
    ...     for time in range(10000):
    ...         series.add(time, 32 * time, 0.5 * 32 * time, 32 * time, time)
    ...     points = read(file.name)
    >>> len(points) <= POINTS, points[0].tolist(), points[1].tolist()
    (True, [0.0, 0.0, 0.0, 0.0, 0.0], [8.0, 256.0, 128.0, 256.0, 8.0])
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
        self, time: float, samples: float, loss: float, weight: float, steps: float
    ) -> None:
        """Adds a point: all are sums from the beginning of the job.

        Args:
            time: in seconds, of `time.monotonic`.
            samples: of all ranks.
            loss: rank 0's, the sum over its samples.
            weight: rank 0's samples.
            steps: rank 0's.
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
        self._tables[active][count] = time, samples, loss, weight, steps
        self._header[1 + active] = count + 1
        self._last = time


def read(path: str | os.PathLike[str]) -> np.ndarray:
    """The points: float64 of shape (points, 5), as given to `TrainingSeries.add`."""
    numbers = np.fromfile(path, np.float64)
    if len(numbers) != _NUMBERS:
        return np.zeros((0, _COLUMNS))
    header, tables = _parts(numbers)
    active = int(header[0])
    return tables[active][: int(header[1 + active])].copy()


def _parts(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    header, rest = numbers[:_HEADER], numbers[_HEADER:]
    return header, rest.reshape(2, POINTS, _COLUMNS)
