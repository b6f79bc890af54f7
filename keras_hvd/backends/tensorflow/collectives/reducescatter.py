"""Reducescatter: every rank gets some rows of the reduced tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_hvd.backends.compression import require_compressor
from keras_hvd.backends.reduce_op import Average, ReduceOp, Sum, scales_of
from keras_hvd.backends.tensorflow.collectives import (
    allgather,
    allreduce_op,
    contributions,
    job_values,
    reductions,
    submission,
)
from keras_hvd.backends.tensorflow.compression import Compression
from keras_hvd.job import arrival
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a tensor over all ranks, and gives each rank some rows of the result.

    Differentiable: the gradient is the concatenation of the ranks' gradients. With
    `Sum` it is multiplied by the number of ranks, as in Horovod.

    Args:
        tensor: a tensor, variable, array or list with at least one dimension, and the
            same shape and type on every rank.
        device_dense: ignored; accepted for existing scripts.
        compression: how the tensor is compressed for sending:
            `keras_hvd.Compression.none`, `fp16` or `bf16`.
        op: `keras_hvd.Average` or `keras_hvd.Sum`.
        name: matches the tensor between ranks; by default the op's name in its
            `tf.function`.
        process_set: the ranks that take part; by default all of them.
        ignore_name_scope: whether to leave `tf.name_scope`s out of that default name.
        prescale_factor: multiplies each rank's elements before the reduction; integers
            are rounded towards zero.
        postscale_factor: multiplies the result.

    Returns:
        This rank's rows. Rank 0 has the first rows, rank 1 the next ones, and so on. If
        the rows do not divide, the first ranks have one more. The values are bit for
        bit those of `allreduce`.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: the element type is not supported, a factor is not a number, or
            `compression` is not a compressor.
        ValueError: `tensor` is a scalar, `op` is another reduction, a factor is
            infinite for integers, or the process set is not part of the job.
        tf.errors.FailedPreconditionError: the ranks' requests do not match.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.reducescatter([[1.0, 2.0], [3.0, 4.0]], op=keras_hvd.Sum).numpy()
    array([[1., 2.],
           [3., 4.]], dtype=float32)
    """
    [reduced] = _reduced(
        "reducescatter",
        [tensor],
        op,
        (prescale_factor, postscale_factor),
        compression,
        process_set,
        name,
        ignore_name_scope,
    )
    return reduced


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduces and scatters several tensors as one group: all or none.

    Differentiable, as `reducescatter` is.

    Args:
        tensors: as for `reducescatter`; types and shapes may be mixed.
        device_dense: ignored; accepted for existing scripts.
        compression: how the tensors are compressed for sending:
            `keras_hvd.Compression.none`, `fp16` or `bf16`.
        op: `keras_hvd.Average` or `keras_hvd.Sum`.
        process_set: the ranks that take part; by default all of them.
        prescale_factor: multiplies each rank's elements before the reduction; integers
            are rounded towards zero.
        postscale_factor: multiplies the results.
        name: matches the group between ranks; by default the op's name in its
            `tf.function`.

    Returns:
        This rank's rows of each, in the order of `tensors`.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: an element type is not supported, a factor is not a number, or
            `compression` is not a compressor.
        ValueError: one of `tensors` is a scalar, `op` is another reduction, a factor is
            infinite for integers, or the process set is not part of the job.
        tf.errors.FailedPreconditionError: the ranks' requests do not match.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> rows = keras_hvd.grouped_reducescatter([[1.0, 2.0], [[3]]])
    >>> [each.numpy().tolist() for each in rows]
    [[1.0, 2.0], [[3]]]
    """
    return _reduced(
        "grouped_reducescatter",
        tensors,
        op,
        (prescale_factor, postscale_factor),
        compression,
        process_set,
        name,
    )


def _reduced(
    kind: str,
    tensors: Sequence[Any],
    reduce_op: ReduceOp,
    factors: tuple[Any, Any],
    compression: Any,
    process_set: ProcessSet,
    name: str | None,
    ignore_name_scope: bool = False,
) -> list[tf.Tensor]:
    arrival.require_arrived(kind)
    number = number_of(process_set, kind)
    reduce_op = _reduce_op(kind, reduce_op)
    scales = scales_of(kind, *factors)
    require_compressor(kind, compression)
    own, restore = contributions.to_reduction(tensors, reduce_op, process_set)
    given = [
        submission.with_rows(kind, "splits", tensor, reduces=True) for tensor in own
    ]
    submission.require_scalable(kind, scales, [tensor.dtype for tensor in given])
    if not given:
        return []
    compressed = [compression.compress(tensor) for tensor in given]
    names = submission.name_of(kind, name, ignore_name_scope, number)
    group = [tensor for tensor, _ in compressed]
    reduced = allreduce_op.submit(
        group, names, reduce_op, *scales, number, "reducescatter"
    )
    results = [
        compression.decompress(result, context)
        for result, (_, context) in zip(reduced, compressed, strict=True)
    ]
    results = restore(results)
    reductions.note(given, results, number, sums=True)
    return results


def _reduce_op(kind: str, op: ReduceOp) -> ReduceOp:
    if op in (Sum, Average):
        return ReduceOp(op)
    raise ValueError(
        f"{kind}: op must be keras_hvd.Sum or keras_hvd.Average; got {op!r}"
    )


@tf.RegisterGradient("KerasHvdReducescatter")
def _gradient(op: tf.Operation, *gradients: tf.Tensor) -> list[tf.Tensor | None]:
    """Concatenates the ranks' gradients, for outputs that have a gradient.

    With `Sum`, they are multiplied by the number of ranks, as in Horovod.
    """
    process_set = op.get_attr("process_set")
    size = job_values.size_of(process_set)
    scale = float(op.get_attr("prescale")) * float(op.get_attr("postscale"))
    if op.get_attr("reduce_op") == Sum:
        scale *= tf.cast(size, tf.float64)
    smooth = submission.smooth_gradients(op.outputs, gradients)
    gathered = allgather.submit(
        [_padded(gradient, op.inputs[i], size) for i, gradient in smooth.items()],
        submission.name_of_gradient(op),
        process_set,
    )
    by_index = {}
    for i, rows in zip(smooth, gathered, strict=True):
        rows = _without_padding(rows, op.inputs[i], size)
        by_index[i] = tf.cast(scale, rows.dtype) * rows
    return [by_index.get(i) for i in range(len(op.outputs))]


# Under XLA, an allgather takes the same number of rows from every rank. Ranks with one
# row fewer add one, compiled or not. So the ranks need not agree on compilation.


def _padded(gradient: tf.Tensor, tensor: tf.Tensor, size: int | tf.Tensor) -> tf.Tensor:
    most = (tf.shape(tensor)[0] + size - 1) // size
    shape = tf.concat([[most], tf.shape(gradient)[1:]], 0)
    missing = tf.zeros(shape, gradient.dtype)[tf.shape(gradient)[0] :]
    return tf.concat([gradient, missing], 0)


def _without_padding(
    rows: tf.Tensor, tensor: tf.Tensor, size: int | tf.Tensor
) -> tf.Tensor:
    """The rows of all ranks, of which the first ones may have one more than others."""
    count = tf.shape(tensor)[0]
    least, longer = count // size, count % size
    # Each rank before this one has added a row, if its rows are the fewer ones.
    before = (tf.range(count) - longer * (least + 1)) // tf.maximum(least, 1)
    added = tf.where(longer > 0, tf.maximum(before, 0), 0)
    rows = tf.gather(rows, tf.range(count) + added)
    return tf.ensure_shape(rows, tensor.shape)
