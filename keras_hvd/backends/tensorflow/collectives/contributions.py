"""What a rank gives to the collectives that a user's step calls.

Under a strategy a rank may have no rows of a batch, and computes on a row that is not
its own. What comes of that row does not count. Only the strategy, which is above the
collectives, knows it; so it tells them here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from keras_hvd.backends.reduce_op import ReduceOp
from keras_hvd.job.process_sets import ProcessSet

# Makes the results of what a rank gives those of what counts.
Restore = Callable[[Sequence[Any]], list[Any]]


class Rules(Protocol):
    """What a rank gives in place of values that may not count."""

    def to_reduction(
        self, values: Sequence[Any], op: ReduceOp, process_set: ProcessSet
    ) -> tuple[list[Any], Restore]:
        """What is reduced, and the way from its results to those that are meant."""

    def to_gather(self, value: tf.Tensor) -> tf.Tensor:
        """The rows that count."""


_rules: Rules | None = None
_here = threading.local()


def follow(rules: Rules) -> None:
    """Applies rules to all collectives of reductions and gathers from now on."""
    global _rules
    _rules = rules


def to_reduction(
    values: Sequence[Any], op: ReduceOp, process_set: ProcessSet
) -> tuple[list[Any], Restore]:
    """What this rank gives to a reduction, and how its results become those meant.

    Example:

    >>> from keras_hvd.backends.reduce_op import Sum
    >>> from keras_hvd.job.process_sets import global_process_set
    >>> given, restore = to_reduction([1.0], Sum, global_process_set)
    >>> given, restore([2.0])
    ([1.0], [2.0])
    """
    if _rules is None or _are_given():
        return list(values), list
    return _rules.to_reduction(values, op, process_set)


def to_gather(value: tf.Tensor) -> tf.Tensor:
    """The rows that this rank gives to an allgather.

    >>> to_gather(tf.constant([1.0])).numpy().item()
    1.0
    """
    return value if _rules is None or _are_given() else _rules.to_gather(value)


@contextlib.contextmanager
def as_given() -> Iterator[None]:
    """Collectives in this block are given only what counts.

    >>> with as_given():
    ...     _are_given()
    True
    """
    before = _are_given()
    _here.given = True
    try:
        yield
    finally:
        _here.given = before


def _are_given() -> bool:
    return getattr(_here, "given", False)
