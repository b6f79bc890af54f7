"""Questions about graphs and devices whose answers are fixed where all is eager."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.job import native


def executing_eagerly() -> bool:
    """Whether values are known now.

    >>> executing_eagerly()
    True
    """
    return True


def init_scope() -> contextlib.AbstractContextManager:
    """A context outside of the graph that is being traced: there is none.

    >>> with init_scope():
    ...     pass
    """
    return contextlib.nullcontext()


def on_cpu() -> contextlib.AbstractContextManager:
    """A context for collectives of a few numbers, which are in host memory anyway.

    >>> with on_cpu():
    ...     pass
    """
    return contextlib.nullcontext()


def only_alone(reduction: GradientReduction) -> contextlib.AbstractContextManager:
    """A context for a step without a reduction: nothing of it is kept.

    >>> with only_alone(GradientReduction()):
    ...     pass
    """
    del reduction
    return contextlib.nullcontext()


def name_in_graph(name: str) -> str:
    """A collective's own name: one ends before the next begins.

    >>> name_in_graph("adam/w")
    'adam/w'
    """
    return name


def require_as_traced(*quantities: str, process_set: int = 0) -> list[Any]:
    """The checks that a trace makes in later jobs: there is no trace.

    >>> require_as_traced("size")
    []
    """
    del quantities, process_set
    return []


def size_of(process_set: int = 0) -> int:
    """The number of ranks of a process set.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> size_of()
    1
    """
    return native.engine().khvd_process_set_size(process_set)


def is_local_source(variable: Any) -> bool:
    """Whether a distributed tape keeps a variable's gradients: torch has no tape.

    >>> is_local_source(None)
    False
    """
    del variable
    return False


def add_up_all(grads: list[Any]) -> list[Any]:
    """The gradients of a rank that is alone, as they are.

    >>> add_up_all([None])
    [None]
    """
    return grads


class WholeStep(contextlib.ExitStack):
    """A context for an update: a reduction has ended, or failed, before it begins.

    Example:

    >>> with WholeStep() as step:
    ...     step.wait_for_all([1.0], counts=[])
    [1.0]
    """

    def wait_for_all(self, grads: Sequence[Any], counts: Iterable[Any]) -> list[Any]:
        """The same gradients."""
        del counts
        return list(grads)

    def delay(self, variables: Iterable[Any]) -> None:
        """Does nothing: the variables' values have waited."""
