"""The order of the compiled functions in a `tf.function` that is not compiled.

XLA holds the thread that runs a program until the program has ended, and TensorFlow has
as many threads for that as the process has cores. Left alone, it runs functions that do
not depend on each other in any order: each rank would hold its threads for a program
that waits for another rank, which cannot begin it. In one order on all ranks, the first
that has not ended can always go on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import control_flow_util

# Ops with a state that run functions.
_CALLS = frozenset({"StatefulPartitionedCall", "If", "Case", "While"})


def keep_compiled_calls_in_order(op: tf.Operation, reads: Any, writes: Any) -> bool:
    """Has a call with compiled collectives wait for the one before it in its graph.

    TensorFlow asks for each op of a graph, in the order of the program, what it reads
    and writes; False leaves both as they are. Calls of functions that use the same
    variables are in order anyhow.

    >>> @tf.function
    ... def step(x):
    ...     y = tf.identity(x)
    ...     print(keep_compiled_calls_in_order(y.op, set(), set()))
    ...     return y
    >>> int(step(1))
    False
    1
    """
    del reads, writes
    if op.type not in _CALLS or not _runs_compiled_collectives(op):
        return False
    last = getattr(op.graph, "_keras_hvd_last_compiled_call", None)
    op.graph._keras_hvd_last_compiled_call = op
    # Those of an old-style branch have their own place in the graph.
    if last not in (None, op) and _place(last) is _place(op):
        op._add_control_input(last)
    return False


def _runs_compiled_collectives(op: tf.Operation) -> bool:
    # A graph that is compiled itself becomes one program with all that it calls.
    if control_flow_util.GraphOrParentsInXlaContext(op.graph):
        return False
    return any(_has_compiled_collectives(name) for name in _functions([op.node_def]))


@functools.lru_cache(maxsize=4096)
def _has_compiled_collectives(function: str, compiled: bool = False) -> bool:
    """Whether there are any in a function, or in what it calls."""
    if not context.context().has_function(function):
        return False
    definition = context.context().get_function_def(function)
    if "_XlaMustCompile" in definition.attr:
        compiled |= definition.attr["_XlaMustCompile"].b
    if compiled and any(node.op.startswith("KerasHvd") for node in definition.node_def):
        return True
    called = set(_functions(definition.node_def))
    return any(_has_compiled_collectives(name, compiled) for name in called)


def _functions(nodes: Iterable[Any]) -> Iterator[str]:
    """The names of the functions that nodes of a graph run."""
    for node in nodes:
        for value in node.attr.values():
            names = [value.func.name, *(each.name for each in value.list.func)]
            yield from filter(None, names)


def _place(op: tf.Operation) -> Any:
    """The old-style branch of a call, on whose inside a compiled one seems to be."""
    place = op._control_flow_context
    if place is not None and place.IsXLAContext():
        return place.outer_context
    return place
