"""Allgather: every rank gets the concatenation of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_hvd.backends.tensorflow.collectives import (
    allreduce_op,
    contributions,
    job_values,
    reductions,
    submission,
)
from keras_hvd.job import arrival
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenates the ranks' tensors along their first dimension.

    Differentiable: each rank gets its rows of the average of all ranks' gradients, as
    in Horovod.

    Args:
        tensor: a tensor, variable, array or list with at least one dimension. The first
            may differ between ranks, and may be zero; the others and the type may not.
        name: matches the tensor between ranks; by default the op's name in its
            `tf.function`.
        ignore_name_scope: whether to leave `tf.name_scope`s out of that default name.
        process_set: the ranks that take part; by default all of them.

    Returns:
        The rows of the lowest rank, then those of the next rank, and so on.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: the element type is not supported.
        ValueError: `tensor` is a scalar, or the process set is not part of the job.
        tf.errors.FailedPreconditionError: the ranks' requests do not match.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.allgather([[1, 2], [3, 4]]).numpy()
    array([[1, 2],
           [3, 4]], dtype=int32)
    """
    [gathered] = _gathered("allgather", [tensor], name, ignore_name_scope, process_set)
    return gathered


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Concatenates several tensors over the ranks as one group: all or none.

    Differentiable: each rank gets its rows of the averages of all ranks' gradients, as
    in Horovod.

    Args:
        tensors: as for `allgather`; types and shapes may be mixed.
        name: matches the group between ranks; by default the op's name in its
            `tf.function`.
        ignore_name_scope: whether to leave `tf.name_scope`s out of that default name.
        process_set: the ranks that take part; by default all of them.

    Returns:
        The results, in the order of `tensors`.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: an element type is not supported.
        ValueError: one of `tensors` is a scalar, or the process set is not part of the
            job.
        tf.errors.FailedPreconditionError: the ranks' requests do not match.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> [t.numpy().tolist() for t in keras_hvd.grouped_allgather([[1, 2], [[0.5]]])]
    [[1, 2], [[0.5]]]
    """
    return _gathered("grouped_allgather", tensors, name, ignore_name_scope, process_set)


def _gathered(
    kind: str,
    tensors: Sequence[Any],
    name: str | None,
    ignore_name_scope: bool,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    arrival.require_arrived(kind)
    number = number_of(process_set, kind)
    given = [
        contributions.to_gather(submission.with_rows(kind, "joins", tensor))
        for tensor in tensors
    ]
    if not given:
        return []
    names = submission.name_of(kind, name, ignore_name_scope, number)
    reductions.note(given, [], number, sums=False)
    return submit(given, names, number)


def submit(
    tensors: list[tf.Tensor], name: submission.Name, process_set: int = 0
) -> list[tf.Tensor]:
    """Runs one op for all tensors, or adds it to the graph."""
    gathered, _ = submission.submit("allgather", name, process_set, tensors=tensors)
    return gathered


@tf.RegisterGradient("KerasHvdAllgather")
def _gradient(op: tf.Operation, *gradients: tf.Tensor) -> list[tf.Tensor | None]:
    """This rank's rows of the averaged gradients, for outputs that have a gradient."""
    gathered, first_dims = op.outputs[:-1], op.outputs[-1]
    process_set = op.get_attr("process_set")
    # Ranks outside of the set also differentiate branches that they never take.
    rank = tf.maximum(job_values.rank_in(process_set), 0)
    smooth = submission.smooth_gradients(gathered, gradients[:-1])
    averages = allreduce_op.average_of_gradients(
        list(smooth.values()), submission.name_of_gradient(op), process_set
    )
    by_index = {}
    for i, average in zip(smooth, averages, strict=True):
        # XLA must know the number of rows, also in a branch. The start is not constant.
        # tf.slice would turn it, and the tensors that first_dims comes from, into
        # constants, and XLA would compile every step anew.
        rows = tf.range(tf.shape(op.inputs[i], tf.int64)[0])
        of_lower = tf.range(tf.shape(first_dims)[1]) < rank
        start = tf.reduce_sum(tf.where(of_lower, first_dims[i], 0))
        by_index[i] = tf.ensure_shape(
            tf.gather(average, start + rows), op.inputs[i].shape
        )
    return [by_index.get(i) for i in range(len(gathered))]
