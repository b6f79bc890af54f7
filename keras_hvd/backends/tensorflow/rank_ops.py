"""This process' place in the job as TensorFlow ops, which read it when a graph runs."""

from __future__ import annotations

import tensorflow as tf

from keras_hvd.backends.tensorflow.collectives import submission
from keras_hvd.job import basics, later_jobs, native


def rank_op(name: str | None = None) -> tf.Tensor:
    """This process' number in the job, read when the op runs.

    Args:
        name: of the op.

    Returns:
        An int32 scalar; in a program compiled by XLA, a constant, and an error in a
        later job in which it is another.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> int(keras_hvd.rank_op())
    0
    """
    return _place("rank_op", "rank", name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks in the job or in a process set, read when the op runs.

    Args:
        process_set_id: of a `ProcessSet`; by default that of all ranks.
        name: of the op.

    Returns:
        An int32 scalar; in a program compiled by XLA, a constant, and an error in a
        later job in which it is another.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: `process_set_id` is not a whole number.
        tf.errors.FailedPreconditionError: the process set does not exist.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> int(keras_hvd.size_op())
    1
    """
    return _place("size_op", "size", name, process_set_id)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process' number among those on its host, read when the op runs.

    Args:
        name: of the op.

    Returns:
        An int32 scalar; in a program compiled by XLA, a constant, and an error in a
        later job in which it is another.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> int(keras_hvd.local_rank_op())
    0
    """
    return _place("local_rank_op", "local_rank", name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of the job's processes on this host, read when the op runs.

    Args:
        name: of the op.

    Returns:
        An int32 scalar; in a program compiled by XLA, a constant, and an error in a
        later job in which it is another.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> int(keras_hvd.local_size_op())
    1
    """
    return _place("local_size_op", "local_size", name)


def process_set_included_op(
    process_set_id: int = 0, name: str | None = None
) -> tf.Tensor:
    """Whether this process is in a process set, read when the op runs.

    Args:
        process_set_id: of a `ProcessSet`; by default that of all ranks.
        name: of the op.

    Returns:
        An int32 scalar, 1 or 0; in a program compiled by XLA, a constant, and an error
        in a later job in which it is another.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: `process_set_id` is not a whole number.
        tf.errors.FailedPreconditionError: the process set does not exist.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> int(keras_hvd.process_set_included_op())
    1
    """
    return _place("process_set_included_op", "included", name, process_set_id)


def _place(
    function: str, quantity: str, name: str | None, process_set: int = 0
) -> tf.Tensor:
    basics.require_initialized(function)
    number = basics.whole_number(function, "process_set_id", process_set)
    if submission.is_compiled():
        later_jobs.note_held(quantity)
    return native.ops().keras_hvd_job_value(
        quantity=quantity, process_set=number, name=name or function
    )


tf.no_gradient("KerasHvdJobValue")
tf.no_gradient("KerasHvdSameJobValue")
tf.no_gradient("KerasHvdNoteChange")
tf.no_gradient("KerasHvdRequireUnchanged")
