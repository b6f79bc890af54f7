"""Numbers of the job in traced functions: a later job may have others.

A process may leave a job and join another, and keeps its traced functions. So a trace
reads such a number when it runs. Where the graph itself depends on the number, it has a
check, which is an error in a job in which the number is another.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_hvd.backends.tensorflow.collectives import submission
from keras_hvd.job import basics, later_jobs, native


def size_of(process_set: int = 0) -> int | tf.Tensor:
    """The number of ranks of a process set, read when the graph runs if there is one.

    In a program compiled by XLA it is a constant, with a check.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> size_of()
    1
    >>> tf.function(size_of)().numpy().item()
    1
    """
    return _value("size", process_set)


def rank_in(process_set: int = 0) -> int | tf.Tensor:
    """This rank's place in a process set, read like `size_of`; -1 if it has none.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> rank_in()
    0
    """
    return _value("rank", process_set)


def require_as_traced(
    *quantities: str, process_set: int = 0, dataset: str = ""
) -> list[tf.Operation]:
    """Makes the current graph fail in jobs in which "size" or "rank" is another.

    It costs microseconds, and nothing outside of a graph. A `tf.function` runs the
    returned checks by itself; in a session something must depend on them. `dataset` is
    the function that makes the dataset whose graph it is, for the error.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> @tf.function
    ... def step():
    ...     [check] = require_as_traced("size")
    ...     print(check.get_attr("value"), check.get_attr("place"))
    >>> step()
    1 b'rank 0 of 1'
    """
    later_jobs.note_held(*quantities)
    if tf.executing_eagerly() or not _has_op():
        return []
    return [_check(quantity, process_set, dataset) for quantity in quantities]


def _check(quantity: str, process_set: int, dataset: str) -> tf.Operation:
    graph: Any = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "_keras_hvd_checks"):
        graph._keras_hvd_checks = {}
    checks = graph._keras_hvd_checks
    key = quantity, process_set
    # An old-style branch or loop is a part of the graph that may not run.
    is_whole = graph._get_control_flow_context() is None
    if is_whole and key in checks:
        return checks[key]
    # The present number, not an op: the graph is being built for this number.
    check = native.ops().keras_hvd_same_job_value(
        quantity=quantity,
        process_set=process_set,
        value=_number(quantity, process_set),
        place=f"rank {basics.rank()} of {basics.size()}",
        dataset=dataset,
        name=f"keras_hvd_same_{quantity}",
    )
    submission.run_operation_independently(check)
    if is_whole:
        checks[key] = check
    return check


def _value(quantity: str, process_set: int) -> int | tf.Tensor:
    if submission.is_compiled():
        later_jobs.note_held(quantity)
    if tf.executing_eagerly() or not _has_op():
        return _number(quantity, process_set)
    value = native.ops().keras_hvd_job_value(quantity=quantity, process_set=process_set)
    submission.run_independently(value)
    return value


def _number(quantity: str, process_set: int) -> int:
    return getattr(native.engine(), f"khvd_process_set_{quantity}")(process_set)


def _has_op() -> bool:
    """Whether the current graph can have ops of keras_hvd, which XLA may not know."""
    return not submission.is_compiled() or native.ops_info(tf.__version__)["xla"]
