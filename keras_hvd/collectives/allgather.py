"""Concatenation of all ranks' tensors: every rank gets all of them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_hvd import basics, native
from keras_hvd.collectives import allreduce, submission
from keras_hvd.process_sets import ProcessSet, global_process_set, number_of


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenates the ranks' tensors along their first dimension.

    Differentiable: each rank gets its rows of the sum of all ranks' gradients.

    Args:
        tensor: a tensor, variable, array or list of at least one dimension. The first
            may differ between ranks, and be zero; the others, and the type, may not.
        name: matches the tensor to the other ranks'; by default the op's name in its
            `tf.function`.
        ignore_name_scope: leaves `tf.name_scope`s out of that default name.
        process_set: the ranks that take part; by default all of them.

    Returns:
        The rows of the lowest rank, then those of the next one, and so on.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: the element type is not supported.
        ValueError: `tensor` is a scalar, or the process set not part of the job.
        tf.errors.InvalidArgumentError: the ranks' requests do not fit each other.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.allgather([[1, 2], [3, 4]]).numpy()
    array([[1, 2],
           [3, 4]], dtype=int32)
    """
    basics.require_initialized("allgather")
    tensor = submission.as_tensor("allgather", tensor)
    if tensor.shape.rank == 0:
        raise ValueError(
            "allgather joins tensors along their first dimension, and a scalar has "
            f"none: give it one, with tf.expand_dims(x, 0); got {tensor}"
        )
    number = number_of(process_set, "allgather")
    name = submission.name_of("allgather", name, ignore_name_scope, number)
    return submit(tensor, name, number)


def submit(tensor: tf.Tensor, name: submission.Name, process_set: int = 0) -> tf.Tensor:
    """Runs the op, or adds it to the graph."""
    submission.require_compilable(f"allgather {name.tensor!r}")
    gathered, _ = submission.run(
        native.ops().keras_hvd_allgather,
        name,
        tensor=tensor,
        process_set=process_set,
    )
    if not tf.executing_eagerly():
        submission.run_independently(gathered.op)
    return gathered


@tf.RegisterGradient("KerasHvdAllgather")
def _gradient(op: tf.Operation, gradient: tf.Tensor, _: tf.Tensor | None) -> tf.Tensor:
    """This rank's rows of the gradients' sum."""
    first_dims = op.outputs[1]
    process_set = op.get_attr("process_set")
    # A branch that is never taken is differentiated on ranks outside of the set too.
    rank = max(native.engine().khvd_process_set_rank(process_set), 0)
    [summed] = allreduce.submit(
        [tf.convert_to_tensor(gradient)],
        submission.name_of_gradient(op),
        allreduce.Sum,
        process_set=process_set,
    )
    start = tf.reduce_sum(first_dims[:rank])
    return tf.ensure_shape(summed[start : start + first_dims[rank]], op.inputs[0].shape)
