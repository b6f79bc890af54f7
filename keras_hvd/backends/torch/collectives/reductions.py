"""Counts of a step's reductions: whether a model trains on all ranks is in its step.

An optimizer of keras_hvd counts each time that it takes gradients over. Collectives
count by the elements that they are given. Those of a forward pass are counted apart:
they reduce no gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

# An attribute that marks tensors as reduced, over the process set of this number.
_REDUCED_OVER = "_keras_hvd_reduced_over"


@dataclasses.dataclass
class Counts:
    """Counts of reductions."""

    # Updates of distributed optimizers.
    handed_over: int = 0
    # Elements of tensors, outside and inside of forward passes.
    elements: int = 0
    in_forward_pass: int = 0


_handed_over = 0
_watching: list[Counts] = []


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
    _watching.append(counts)
    try:
        yield counts
    finally:
        _watching.remove(counts)
        counts.handed_over = _handed_over - before


def note(given: Sequence[Any], is_forward: bool) -> None:
    """Counts the elements of a collective that was called."""
    for counts in _watching:
        elements = sum(map(elements_of, given))
        if is_forward:
            counts.in_forward_pass += elements
        else:
            counts.elements += elements


def mark(tensor: Any, process_set: int) -> None:
    """Records that a tensor has been reduced, so that no optimizer sums it again.

    >>> import torch
    >>> tensor = torch.zeros(1)
    >>> mark(tensor, 0)
    >>> mark_of(tensor)
    0
    """
    if not tensor.is_inference():
        setattr(tensor, _REDUCED_OVER, (process_set, tensor._version))


def mark_of(tensor: Any) -> int | None:
    """Returns the number of the process set over which it was reduced, or None.

    One that was changed in place since then, perhaps to undo that, is not known.
    """
    process_set, version = getattr(tensor, _REDUCED_OVER, (None, None))
    return process_set if version is None or tensor._version == version else None


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
