"""Keeps calls of functions in order in a `tf.function`: compiled ones, and joins.

Compiled ones, if it is not compiled itself: XLA holds a thread until its program has
ended, and TensorFlow has as many such threads as the process has cores. By default,
TensorFlow runs independent functions in any order. Then each rank could fill its
threads with programs that wait for another rank, which has no thread left to run them.
With one order on all ranks, the first program that has not ended can always go on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import control_flow_util

# Ops of keras_hvd that wait for no other rank.
_LOCAL = frozenset({"KerasHvdJobValue", "KerasHvdSameJobValue"})

# Stateful ops that call functions.
_CALLS = frozenset({"StatefulPartitionedCall", "If", "Case", "While"})


def keep_compiled_calls_in_order(op: tf.Operation, reads: Any, writes: Any) -> bool:
    """Makes a call with compiled collectives wait for the previous one in its graph.

    TensorFlow calls it for each op of a graph in program order, to learn which
    resources the op reads and writes. False leaves both unchanged. Calls that use the
    same variables are in order anyway.

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
    # An old-style branch has a place of its own in the graph.
    if last not in (None, op) and _place(last) is _place(op):
        op._add_control_input(last)
    return False


def keep_joins_in_place(op: tf.Operation, reads: Any, writes: Any) -> bool:
    """Makes a call that joins wait for the ops before it, and later calls wait for it.

    TensorFlow calls it like `keep_compiled_calls_in_order`. By itself, TensorFlow
    orders calls and loops with variables by these alone, and a join has none.

    >>> @tf.function
    ... def step(x):
    ...     y = tf.identity(x)
    ...     print(keep_joins_in_place(y.op, set(), set()))
    ...     return y
    >>> int(step(1))
    False
    1
    """
    del reads, writes
    if op.type not in _CALLS:
        return False
    last = getattr(op.graph, "_keras_hvd_last_join", None)
    if last not in (None, op):
        op._add_control_input(last)
    if any(map(_joins, _functions([op.node_def]))):
        op.graph._keras_hvd_last_join = op
        before = itertools.takewhile(
            lambda other: other != op, op.graph.get_operations()
        )
        op._add_control_inputs([each for each in before if each._is_stateful])
    return False


@functools.lru_cache(maxsize=4096)
def _joins(function: str) -> bool:
    """Whether a function, or one that it calls, joins."""
    if not context.context().has_function(function):
        return False
    nodes = context.context().get_function_def(function).node_def
    if any(node.op == "KerasHvdJoin" for node in nodes):
        return True
    return any(map(_joins, set(_functions(nodes))))


def _runs_compiled_collectives(op: tf.Operation) -> bool:
    # A compiled graph becomes one program, including all functions that it calls.
    if control_flow_util.GraphOrParentsInXlaContext(op.graph):
        return False
    return any(_has_compiled_collectives(name) for name in _functions([op.node_def]))


@functools.lru_cache(maxsize=4096)
def _has_compiled_collectives(function: str, compiled: bool = False) -> bool:
    """Whether a function, or one that it calls, has compiled collectives."""
    if not context.context().has_function(function):
        return False
    definition = context.context().get_function_def(function)
    if "_XlaMustCompile" in definition.attr:
        compiled |= definition.attr["_XlaMustCompile"].b
    ops = {node.op for node in definition.node_def} - _LOCAL
    if compiled and any(op.startswith("KerasHvd") for op in ops):
        return True
    called = set(_functions(definition.node_def))
    return any(_has_compiled_collectives(name, compiled) for name in called)


def _functions(nodes: Iterable[Any]) -> Iterator[str]:
    """The names of the functions that nodes of a graph call."""
    for node in nodes:
        for value in node.attr.values():
            names = [value.func.name, *(each.name for each in value.list.func)]
            yield from filter(None, names)


def _place(op: tf.Operation) -> Any:
    """The old-style branch around a call, without a compiled call's own XLA context."""
    place = op._control_flow_context
    if place is not None and place.IsXLAContext():
        return place.outer_context
    return place
