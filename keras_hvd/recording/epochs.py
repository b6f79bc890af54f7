"""The epochs of a training and their logs: a line for each, which rank 0 writes."""

from __future__ import annotations

import contextlib
import json
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST = 1000
"""The most epochs that are kept: of more, every second, fourth and so on."""

Epoch = tuple[int, dict[str, float]]
"""An epoch's number in its `fit`, from 1, and its logs."""


class Epochs:
    """The file, for rank 0: an existing one is overwritten.

    Example:

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "epochs")
    >>> epochs = Epochs(path)
    >>> for number in range(1, 2500):
    ...     epochs.add(number, {"loss": 1 / number, "name": "no number"})
    >>> len(read(path)) <= MOST, read(path)[:2]
    (True, [(1, {'loss': 1.0}), (5, {'loss': 0.2})])
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._path.write_text("")
        self._kept: list[Epoch] = []
        self._count, self._apart = 0, 1

    def add(self, number: int, logs: Mapping[str, Any]) -> None:
        """Adds an epoch; those of its logs that are numbers."""
        self._count += 1
        if (self._count - 1) % self._apart:
            return
        known = {
            name: float(value)
            for name, value in logs.items()
            if isinstance(value, numbers.Real)
        }
        self._kept.append((number, known))
        new, mode = self._kept[-1:], "a"
        if len(self._kept) > MOST:
            self._kept, self._apart = self._kept[::2], 2 * self._apart
            new, mode = self._kept, "w"
        # A job does not end because of an error in writing about it.
        with contextlib.suppress(OSError), self._path.open(mode) as file:
            file.writelines(json.dumps(each) + "\n" for each in new)


def read(path: str | os.PathLike[str]) -> list[Epoch]:
    """The epochs; of a line that is cut off by a kill, nothing."""
    lines = Path(path).read_text().split("\n")
    return [tuple(json.loads(line)) for line in lines[:-1]]
