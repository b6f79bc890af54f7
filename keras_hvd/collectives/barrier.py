"""A point that no rank passes before all have reached it."""

from __future__ import annotations

import tensorflow as tf

from keras_hvd import basics, native
from keras_hvd.collectives import submission


def barrier(name: str | None = None) -> None:
    """Waits until every rank has called it.

    In a `tf.function` it always runs, after the ops with side effects before it (such
    as `tf.print`, `tf.py_function` or another barrier) and before those after it. Other
    collectives keep no such order; `tf.control_dependencies` gives them one.

    Args:
        name: matches the barrier to the other ranks'; by default the op's name in its
            `tf.function`.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.barrier()
    """
    basics.require_initialized("barrier")
    submit(submission.name_of("barrier", name))


def submit(name: submission.Name) -> tf.Operation | None:
    """Runs the op, or adds it to the graph in its place among the side effects."""
    submission.require_compilable(f"barrier {name.tensor!r}")
    op = native.ops().keras_hvd_barrier(tensor_name=name.tensor, name=name.node)
    if op is not None:
        submission.keep_order(op)
    return op


tf.no_gradient("KerasHvdBarrier")
