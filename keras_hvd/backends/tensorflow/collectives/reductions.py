"""Counts of a step's reductions, taken while it is traced or runs eagerly.

Whether a model trains on all ranks depends on the collectives of its step, not on the
configuration. An optimizer or a tape of keras_hvd counts each time that it takes
gradients over. Other collectives count by the elements that they are given. Those of a
forward pass, which a tape records, are counted apart: they reduce no gradients.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe

from keras_hvd.backends.tensorflow.collectives.graph_names import function_graph
from keras_hvd.job.temporary import temporarily

# An attribute that marks tensors as reduced.
_REDUCED_BY = "_keras_hvd_reduced_by"

# An attribute of a graph: the elements of its marked tensors.
_ELEMENTS = "_keras_hvd_reduced_elements"

# Stands for an unknown number of elements.
_MANY = 1 << 62


@dataclasses.dataclass
class Counts:
    """Counts of reductions, run eagerly or traced."""

    # Updates of distributed optimizers, and gradients of distributed tapes.
    handed_over: int = 0
    # Elements of tensors, outside and inside of forward passes.
    elements: int = 0
    in_forward_pass: int = 0


class _Watch:
    """Counts the reductions of a block, for each function that is traced there."""

    def __init__(self) -> None:
        self.counts = Counts()
        # By id; None stands for eager collectives.
        self._graphs: dict[int, Any] = {}
        self._elements: collections.Counter[tuple[int, bool]] = collections.Counter()

    def add(self, graph: Any, elements: int, is_forward: bool) -> None:
        self._graphs[id(graph)] = graph
        self._elements[id(graph), is_forward] += elements

    def end(self) -> None:
        """Sums up; functions that create variables are traced twice, and count once."""
        of_functions = {
            (
                getattr(graph, "name", ""),
                self._elements[key, False],
                self._elements[key, True],
            )
            for key, graph in self._graphs.items()
        }
        self.counts.elements = sum(each[1] for each in of_functions)
        self.counts.in_forward_pass = sum(each[2] for each in of_functions)


@dataclasses.dataclass(frozen=True)
class Mark:
    """The origin of a reduced tensor, and the process set of its reduction."""

    by: str
    process_set: int | None = None


_handed_over = 0
_watching: list[_Watch] = []
_here = threading.local()


def handed_over() -> int:
    """Returns how often optimizers and tapes of this process have taken gradients over.

    >>> handed_over() >= 0
    True
    """
    return _handed_over


@contextlib.contextmanager
def watching() -> Iterator[Counts]:
    """Counts the reductions run or traced in this block; complete when it has ended.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> with watching() as counts:
    ...     _ = keras_hvd.allreduce([1.0, 2.0])
    >>> counts
    Counts(handed_over=0, elements=2, in_forward_pass=0)
    """
    watch = _Watch()
    _watching.append(watch)
    try:
        yield watch.counts
    finally:
        _watching.remove(watch)
        watch.end()


def note_handed_over() -> None:
    """Counts gradients that a distributed optimizer or tape takes over."""
    global _handed_over
    _handed_over += 1
    for watch in _watching:
        watch.counts.handed_over += 1


def not_by_hand() -> contextlib.AbstractContextManager[None]:
    """Marks no results in this block: its collectives are keras_hvd's own."""
    return temporarily(_here, "own", True)


def note(
    given: Sequence[Any], results: Sequence[Any], process_set: int, sums: bool
) -> None:
    """Counts a collective that was called; marks its results if they are sums.

    A collective that a tape records is part of a forward pass, and reduces no
    gradients.
    """
    is_forward = not pywrap_tfe.TFE_Py_TapeSetIsEmpty()
    if sums and not is_forward and not getattr(_here, "own", False):
        mark(results, Mark("collective", process_set))
    if not _watching:
        return
    elements = sum(map(elements_of, given))
    graph = None if tf.executing_eagerly() else function_graph()
    for watch in _watching:
        watch.add(graph, elements, is_forward)


def mark(tensors: Sequence[Any], by: Mark) -> None:
    """Records the origin of reduced tensors, so that no optimizer reduces them again.

    >>> tensor = tf.constant(1.0)
    >>> mark([tensor], Mark("tape"))
    >>> mark_of(tensor).by
    'tape'
    """
    if not tf.executing_eagerly():
        graph = _outermost()
        elements = marked_elements() + sum(map(elements_of, tensors))
        setattr(graph, _ELEMENTS, elements)
    for each in tensors:
        setattr(each, _REDUCED_BY, by)
        if isinstance(each, tf.IndexedSlices):
            # Clipping makes new slices with the same indices.
            setattr(each.indices, _REDUCED_BY, by)


def mark_of(tensor: Any) -> Mark | None:
    """Returns the mark of a reduced tensor, or None."""
    if isinstance(tensor, tf.IndexedSlices):
        return getattr(tensor.indices, _REDUCED_BY, None)
    return getattr(tensor, _REDUCED_BY, None)


def marked_elements() -> int:
    """The elements of marked tensors in the graph being traced.

    >>> marked_elements()
    0
    """
    return getattr(_outermost(), _ELEMENTS, 0)


def elements_of(tensor: Any) -> int:
    """The number of elements of a tensor or slices; very many if it is not known.

    >>> elements_of(tf.zeros([2, 3]))
    6
    """
    if isinstance(tensor, tf.IndexedSlices):
        return _MANY
    number = tf.TensorShape(tensor.shape).num_elements()
    return _MANY if number is None else number


def _outermost() -> Any:
    """The graph being traced, and not that of a branch or function in it."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, tf.__internal__.FuncGraph):
        outer = graph.outer_graph
        if not isinstance(outer, tf.__internal__.FuncGraph):
            break
        graph = outer
    return graph
