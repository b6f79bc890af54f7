"""Alltoall: every rank gets some rows of each rank's tensor."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_hvd.backends.tensorflow.collectives import reductions, submission
from keras_hvd.job import arrival
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Sends some rows of a tensor to each rank, and receives some rows from each rank.

    Differentiable: the gradients of the rows return to the ranks that sent the rows.

    Args:
        tensor: a tensor, variable, array or list with at least one dimension. The first
            may differ between ranks; the others and the type may not.
        splits: the number of rows for each rank. The first rows go to the lowest rank,
            the next rows to the next rank, and so on. The type is int32 or int64;
            narrower integers become int32. By default all ranks get the same number.
        name: matches the tensor between ranks; by default the op's name in its
            `tf.function`.
        ignore_name_scope: whether to leave `tf.name_scope`s out of that default name.
        process_set: the ranks that take part; by default all of them.

    Returns:
        The rows from the lowest rank, then those from the next rank, and so on. With
        `splits`, also the number of rows from each rank, in the type of `splits`.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: the element type is not supported, or `splits` are not integers.
        ValueError: `tensor` is a scalar, `splits` is not a list, or the process set is
            not part of the job.
        tf.errors.InvalidArgumentError: `splits` do not have one number per rank, have a
            negative one, or do not add up to the number of rows; without `splits`, the
            number of rows is not a multiple of the number of ranks.
        tf.errors.FailedPreconditionError: the ranks' requests do not match.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.alltoall([1, 2]).numpy()
    array([1, 2], dtype=int32)
    >>> rows, counts = keras_hvd.alltoall([[1.0], [2.0]], splits=[2])
    >>> counts.numpy()
    array([2], dtype=int32)
    """
    arrival.require_arrived("alltoall")
    number = number_of(process_set, "alltoall")
    tensor = submission.with_rows("alltoall", "splits", tensor)
    reductions.note([tensor], [], number, sums=False)
    if splits is None:
        names = submission.name_of("alltoall", name, ignore_name_scope, number)
        return submit(tensor, None, names, number)[0]
    # A dtype_hint would truncate larger numbers.
    splits = tf.convert_to_tensor(splits)
    if splits.dtype in (tf.int8, tf.uint8, tf.int16, tf.uint16):
        splits = tf.cast(splits, tf.int32)
    if splits.dtype not in (tf.int32, tf.int64):
        raise TypeError(
            f"alltoall: splits must be int32 or int64; got {splits.dtype.name}"
        )
    if splits.shape.rank not in (1, None):
        raise ValueError(
            f"alltoall: splits must be a list with a number for each rank; got {splits}"
        )
    names = submission.name_of("alltoall", name, ignore_name_scope, number)
    wide = tf.cast(splits, tf.int64)
    received, received_splits = submit(tensor, wide, names, number)
    return received, tf.cast(received_splits, splits.dtype)


def submit(
    tensor: tf.Tensor,
    splits: tf.Tensor | None,
    name: submission.Name,
    process_set: int = 0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Runs the op, or adds it to the graph; without `splits`, all get as many rows."""
    return submission.submit(
        "alltoall",
        name,
        process_set,
        tensor=tensor,
        splits=tf.zeros([0], tf.int64) if splits is None else splits,
        even=splits is None,
    )


@tf.RegisterGradient("KerasHvdAlltoall")
def _gradient(
    op: tf.Operation, gradient: tf.Tensor, _: tf.Tensor | None
) -> list[tf.Tensor | None]:
    """Returns the gradients of the rows to the ranks that sent the rows."""
    returned, _ = submit(
        tf.convert_to_tensor(gradient),
        op.outputs[1],
        submission.name_of_gradient(op),
        op.get_attr("process_set"),
    )
    return [tf.ensure_shape(returned, op.inputs[0].shape), None]
