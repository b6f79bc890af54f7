"""Unique names for collectives of equal names in one graph."""

from __future__ import annotations

import collections
from typing import Any

import tensorflow as tf


def name_in_graph(name: str) -> str:
    """Adds a number to a name that the current graph already has.

    Optimizers and variables with equal names (twins, copies) in one `tf.function` may
    reduce at the same time, in a different order on each rank. Each trace has a graph
    of its own, so the numbers are the same on ranks that trace more often.

    >>> @tf.function
    ... def step():
    ...     print(name_in_graph("adam/w"), name_in_graph("adam/w"))
    >>> step()
    adam/w adam/w#1
    """
    return name if tf.executing_eagerly() else numbered(name, "#")


def numbered(name: str, mark: str) -> str:
    """Adds a mark and a number to a name that the function's graph already has."""
    graph = function_graph()
    if not hasattr(graph, "_keras_hvd_names"):
        graph._keras_hvd_names = collections.Counter()
    before = graph._keras_hvd_names[mark, name]
    graph._keras_hvd_names[mark, name] += 1
    return f"{name}{mark}{before}" if before else name


def function_graph() -> Any:
    """The graph of the function being traced, and not of a branch or a loop in it."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph
