"""Counts of a step's reductions: whether a model trains on all ranks is in its step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class Counts:
    """Counts of reductions."""

    # Updates of distributed optimizers.
    handed_over: int = 0
    # Elements of tensors that the step itself reduced. Users have no such function.
    elements: int = 0
    in_forward_pass: int = 0


_handed_over = 0


def handed_over() -> int:
    """Returns how often optimizers of this process have taken gradients over.

    >>> handed_over() >= 0
    True
    """
    return _handed_over


def note_handed_over() -> None:
    """Counts gradients that a distributed optimizer takes over."""
    global _handed_over
    _handed_over += 1


@contextlib.contextmanager
def watching() -> Iterator[Counts]:
    """Counts the reductions of this block; complete when it has ended.

    >>> with watching() as counts:
    ...     note_handed_over()
    >>> counts.handed_over
    1
    """
    before, counts = _handed_over, Counts()
    try:
        yield counts
    finally:
        counts.handed_over = _handed_over - before


def elements_of(tensor: Any) -> int:
    """The number of elements of a tensor or variable.

    >>> import keras
    >>> elements_of(keras.ops.zeros((2, 3)))
    6
    """
    number = 1
    for size in tensor.shape:
        number *= size
    return number
