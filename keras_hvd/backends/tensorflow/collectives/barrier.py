"""Barrier: no rank passes it before all ranks have reached it."""

from __future__ import annotations

import tensorflow as tf

from keras_hvd.backends.tensorflow.collectives import submission
from keras_hvd.job import arrival
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of


def barrier(
    process_set: ProcessSet = global_process_set, name: str | None = None
) -> tf.Operation | None:
    """Waits until every rank of the process set has called it.

    In a `tf.function` it always runs, after the preceding ops with side effects (such
    as `tf.print`, `tf.py_function` or another barrier) and before the following ones.
    Other collectives are not ordered; `tf.control_dependencies` orders them.

    Args:
        process_set: the ranks that take part; by default all of them.
        name: matches the barrier between ranks; by default the op's name in
            its `tf.function`.

    Returns:
        In a `tf.compat.v1` graph, the op for a session to run.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        ValueError: the process set is not part of the job.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.barrier()
    """
    arrival.require_arrived("barrier")
    number = number_of(process_set, "barrier")
    names = submission.name_of("barrier", name, process_set=number)
    op = submission.submit("barrier", names, number)
    if op is not None:
        submission.keep_order(op)
    return op if submission.in_session_graph() else None


tf.no_gradient("KerasHvdBarrier")
