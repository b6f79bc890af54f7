"""Broadcast: every rank gets one rank's tensor."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_hvd.backends import equal_start
from keras_hvd.backends.tensorflow.collectives import (
    allreduce_op,
    job_values,
    submission,
)
from keras_hvd.job import arrival, basics
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Gives every rank the tensor of the root rank.

    Differentiable: the root gets the average of all ranks' gradients, the others get
    zeros, as in Horovod.

    Args:
        tensor: a tensor, variable, array, list or number, with the same shape and type
            on every rank.
        root_rank: the rank that sends its tensor, as numbered in the whole job.
        name: matches the tensor between ranks; by default the op's name in its
            `tf.function`.
        ignore_name_scope: whether to leave `tf.name_scope`s out of that default name.
        process_set: the ranks that take part; by default all of them.

    Returns:
        The root's tensor.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: the element type is not supported, or `root_rank` is not an integer.
        ValueError: the process set is not part of the job.
        tf.errors.InvalidArgumentError: there is no such root rank.
        tf.errors.FailedPreconditionError: the ranks' requests do not match.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.broadcast([1, 2], root_rank=0).numpy()
    array([1, 2], dtype=int32)
    """
    arrival.require_arrived("broadcast")
    number = number_of(process_set, "broadcast")
    root_rank = basics.root_of("broadcast", root_rank)
    names = submission.name_of("broadcast", name, ignore_name_scope, number)
    tensor = submission.as_tensor("broadcast", tensor, reduces=False)
    equal_start.note_broadcast()
    return submission.submit(
        "broadcast", names, number, tensor=tensor, root_rank=root_rank
    )


@tf.RegisterGradient("KerasHvdBroadcast")
def _gradient(op: tf.Operation, gradient: tf.Tensor) -> tf.Tensor:
    """The average of the gradients on the root rank, zeros on the others.

    Zeros alone would not depend on the average, and a session would not compute it.
    """
    [average] = allreduce_op.average_of_gradients(
        [tf.convert_to_tensor(gradient)],
        submission.name_of_gradient(op),
        op.get_attr("process_set"),
    )
    is_root = tf.equal(job_values.rank_in(), op.get_attr("root_rank"))
    return tf.where(is_root, average, tf.zeros_like(average))
