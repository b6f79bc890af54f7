"""Allreduce: every rank gets the same reduced tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_hvd.backends.compression import require_compressor
from keras_hvd.backends.reduce_op import Average, ReduceOp, Sum, chosen, scales_of
from keras_hvd.backends.tensorflow.collectives import (
    allgather,
    contributions,
    job_values,
    reductions,
    submission,
)
from keras_hvd.backends.tensorflow.collectives.allreduce_op import (
    require_supported,
    submit,
)
from keras_hvd.backends.tensorflow.compression import Compression
from keras_hvd.job import arrival
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> tf.Tensor | tf.IndexedSlices:
    """Reduces a tensor element by element over the ranks.

    Differentiable for Sum and Average: the gradient is reduced in the same way.

    Args:
        tensor: a tensor, variable, array, list or number, with the same shape and type
            on every rank; or, on every rank, `tf.IndexedSlices`. Their values and
            indices are gathered.
        average: True means `op=Average`, False `op=Sum`. Pass either this or `op`.
        device_dense: ignored; accepted for existing scripts.
        device_sparse: ignored; accepted for existing scripts.
        compression: how the tensor is compressed for sending:
            `keras_hvd.Compression.none`, `fp16` or `bf16`.
        op: `keras_hvd.Average` (the default), `Sum`, `Min`, `Max`, `Product` or
            `Adasum`. Averages of integers are rounded towards zero. bool takes Min, Max
            and Product. `tf.IndexedSlices` take Sum, and Average, which turns integers
            into floats. Adasum takes floating types, and 1, 2, 4, 8... ranks.
        prescale_factor: multiplies each rank's elements before the reduction; integers
            are rounded towards zero. For integers, both factors must be finite.
        postscale_factor: multiplies the result.
        name: matches the tensor between ranks; by default the op's name in its
            `tf.function`.
        process_set: the ranks that take part; by default all of them.
        ignore_name_scope: whether to leave `tf.name_scope`s out of that default name.

    Returns:
        A tensor of the same shape and type, equal bit for bit on all ranks. For
        `tf.IndexedSlices`, the slices of all ranks, in rank order.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: the element type is not supported, or not by `op`; `average` is not a
            bool, a factor is not a number, or `compression` is not a compressor.
        ValueError: `op` is not a reduction, `average` is passed too, `tf.IndexedSlices`
            do not have one index per row, a factor is infinite for integers, or the
            process set is not part of the job.
        NotImplementedError: `tf.IndexedSlices` with another `op`, or Adasum with a
            number of ranks that is not a power of 2.
        tf.errors.FailedPreconditionError: the ranks' requests do not match.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.allreduce([1.0, 2.0], op=keras_hvd.Sum, postscale_factor=10.0).numpy()
    array([10., 20.], dtype=float32)
    """
    [reduced] = _reduced(
        "allreduce",
        [tensor],
        chosen("allreduce", average, op),
        (prescale_factor, postscale_factor),
        compression,
        process_set,
        name,
        ignore_name_scope,
    )
    return reduced


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduces several tensors as one group: all or none.

    Args:
        tensors: as for `allreduce`; types and shapes may be mixed. Each
            `tf.IndexedSlices` among them is reduced separately.
        average: True means `op=Average`, False `op=Sum`. Pass either this or `op`.
        device_dense: ignored; accepted for existing scripts.
        device_sparse: ignored; accepted for existing scripts.
        compression: how the tensors are compressed for sending:
            `keras_hvd.Compression.none`, `fp16` or `bf16`.
        op: as for `allreduce`; Adasum treats each tensor separately.
        prescale_factor: multiplies each rank's elements before the reduction; integers
            are rounded towards zero.
        postscale_factor: multiplies the results.
        process_set: the ranks that take part; by default all of them.
        ignore_name_scope: whether to leave `tf.name_scope`s out of the default name.
        name: matches the group between ranks; by default the op's name in its
            `tf.function`.

    Returns:
        The results, in the order of `tensors`.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: an element type is not supported, or not by `op`; `average` is not a
            bool, a factor is not a number, or `compression` is not a compressor.
        ValueError: `op` is not a reduction, `average` is passed too, `tf.IndexedSlices`
            do not have one index per row, a factor is infinite for integers, or the
            process set is not part of the job.
        NotImplementedError: `tf.IndexedSlices` with an `op` other than Average or Sum,
            or Adasum with a number of ranks that is not a power of 2.
        tf.errors.FailedPreconditionError: the ranks' requests do not match.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> group = keras_hvd.grouped_allreduce([1.5, 2], op=keras_hvd.Max)
    >>> [tensor.numpy().item() for tensor in group]
    [1.5, 2]
    """
    return _reduced(
        "grouped_allreduce",
        tensors,
        chosen("grouped_allreduce", average, op),
        (prescale_factor, postscale_factor),
        compression,
        process_set,
        name,
        ignore_name_scope,
    )


def _reduced(
    kind: str,
    tensors: Sequence[Any],
    reduce_op: ReduceOp,
    factors: tuple[Any, Any],
    compression: Any,
    process_set: ProcessSet,
    name: str | None,
    ignore_name_scope: bool,
) -> list[tf.Tensor | tf.IndexedSlices]:
    arrival.require_arrived(kind)
    number = number_of(process_set, kind)
    scales = scales_of(kind, *factors)
    require_compressor(kind, compression)
    results, restore = contributions.to_reduction(tensors, reduce_op, process_set)
    sparse = [i for i, t in enumerate(results) if isinstance(t, tf.IndexedSlices)]
    dense = [i for i in range(len(results)) if i not in set(sparse)]
    slices = [_checked_slices(kind, results[i], reduce_op, scales) for i in sparse]
    given = [submission.as_tensor(kind, results[i]) for i in dense]
    submission.require_scalable(kind, scales, [tensor.dtype for tensor in given])
    require_supported(kind, reduce_op, given, process_set)

    # The first collective, dense or not, has the call's own name, and the others wait
    # for it. There, ranks that have slices meet ranks that have none.
    def name_of(part: int) -> submission.Name:
        of_part = f"{name}/{part}" if name and part else name
        return submission.name_of(kind, of_part, ignore_name_scope, number)

    first: list[tf.Tensor] = []
    if dense:
        compressed = [compression.compress(tensor) for tensor in given]
        group = [tensor for tensor, _ in compressed]
        first = submit(group, name_of(0), reduce_op, *scales, number)
        for i, tensor, (_, context) in zip(dense, first, compressed, strict=True):
            results[i] = compression.decompress(tensor, context)
    for part, (i, each) in enumerate(zip(sparse, slices, strict=True)):
        names = name_of(part + 1 if dense else part)
        with tf.control_dependencies(first):
            results[i] = _reduce_slices(
                each, names, compression, reduce_op, scales, process_set
            )
        first = first or [results[i].values]
    results = restore(results)
    reductions.note(given + slices, results, number, reduce_op in (Average, Sum))
    return results


def _checked_slices(
    kind: str,
    slices: tf.IndexedSlices,
    reduce_op: ReduceOp,
    scales: tuple[float, float],
) -> tf.IndexedSlices:
    """Converts slices to tensors; raises any error before anything is sent."""
    if reduce_op not in (Average, Sum):
        raise NotImplementedError(
            f"{kind} of tf.IndexedSlices takes op=Average or Sum, got {reduce_op.name}:"
            " make them dense, with tf.convert_to_tensor(), for any other"
        )
    values = submission.as_tensor(kind, slices.values, reduces=False)
    indices = submission.as_tensor(kind, slices.indices, reduces=False)
    submission.require_scalable(kind, scales, [values.dtype])
    is_number = np.dtype(values.dtype.as_numpy_dtype).kind in "iufc"
    is_number |= values.dtype.is_floating  # types that NumPy itself lacks
    if not is_number and (reduce_op == Average or scales != (1, 1)):
        raise TypeError(
            f"{kind} of tf.IndexedSlices of {values.dtype.name} takes op=Sum, without "
            "factors: such values are only moved"
        )
    if not indices.dtype.is_integer:
        raise TypeError(
            f"{kind}: the indices of tf.IndexedSlices must be integers; got "
            f"{indices.dtype.name}"
        )
    if not values.shape[:1].is_compatible_with(indices.shape):
        raise ValueError(
            f"{kind}: tf.IndexedSlices have an index for each row; got values of shape "
            f"{values.shape} and indices of shape {indices.shape}"
        )
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _reduce_slices(
    slices: tf.IndexedSlices,
    names: submission.Name,
    compression: Any,
    reduce_op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> tf.IndexedSlices:
    """Gathers all ranks' slices; rows with the same index stand for their sum."""
    compressed, context = compression.compress(slices.values)
    number = number_of(process_set, "allreduce")
    gathered, indices = allgather.submit([compressed, slices.indices], names, number)
    values = compression.decompress(gathered, context)
    count = job_values.size_of(number) if reduce_op == Average else None
    values = _scaled(values, scales, count)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _scaled(
    values: tf.Tensor, scales: tuple[float, float], count: int | tf.Tensor | None
) -> tf.Tensor:
    """Multiplies values by both scales, and divides by `count` for an average.

    Each scaling rounds integers towards zero. Their average is a float, as from
    tf.truediv: rows are added up later, and rounding would lose each row's fraction.
    """
    prescale, postscale = scales
    if values.dtype.is_integer:
        values, prescale = _truncated(values, prescale), 1.0
        if count is None:
            return _truncated(values, postscale)
        values = tf.truediv(values, tf.ones([], values.dtype))
    dtype, factor = values.dtype, prescale * postscale
    if not tf.is_tensor(count):
        count = count or 1
        if factor == 1 and count == 1:
            return values
    if dtype.size == 1:  # TensorFlow cannot multiply float8
        values = tf.cast(values, tf.float32)
    if factor != 1:
        values = values * tf.cast(factor, values.dtype)
    # Not multiplied by 1 / count, which is rounded.
    return tf.cast(values / tf.cast(count, values.dtype), dtype)


def _truncated(integers: tf.Tensor, factor: float) -> tf.Tensor:
    if factor == 1:
        return integers
    return tf.saturate_cast(tf.cast(integers, tf.float64) * factor, integers.dtype)
