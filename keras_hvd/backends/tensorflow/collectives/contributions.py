"""This rank's contributions to the collectives that a user's step calls.

Under a strategy a rank may have no rows of a batch. It then computes on a row that is
not its own, whose results do not count. Only the strategy, which is above the
collectives, knows it, so it sets rules here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from keras_hvd.backends.reduce_op import ReduceOp
from keras_hvd.job.process_sets import ProcessSet
from keras_hvd.job.temporary import temporarily

# Turns the results of a reduction of contributions into the results that count.
Restore = Callable[[Sequence[Any]], list[Any]]


class Rules(Protocol):
    """Replaces values that may not count by this rank's contribution."""

    def to_reduction(
        self, values: Sequence[Any], op: ReduceOp, process_set: ProcessSet
    ) -> tuple[list[Any], Restore]:
        """Returns the values to reduce, and a function that restores the results."""

    def to_gather(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the rows that count."""


_rules: Rules | None = None
_here = threading.local()


def follow(rules: Rules) -> None:
    """Applies rules to all collectives of reductions and gathers from now on."""
    global _rules
    _rules = rules


def to_reduction(
    values: Sequence[Any], op: ReduceOp, process_set: ProcessSet
) -> tuple[list[Any], Restore]:
    """Returns this rank's values for a reduction, and how to restore its results.

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
    """Returns the rows that this rank gives to an allgather.

    >>> to_gather(tf.constant([1.0])).numpy().item()
    1.0
    """
    return value if _rules is None or _are_given() else _rules.to_gather(value)


def as_given() -> contextlib.AbstractContextManager[None]:
    """Tells the collectives in this block that all their values count.

    >>> with as_given():
    ...     _are_given()
    True
    """
    return temporarily(_here, "given", True)


def _are_given() -> bool:
    return getattr(_here, "given", False)
