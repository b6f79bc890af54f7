"""Reduction of a step's gradients, bucket by bucket, while backprop continues."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf

from keras_hvd.backends.reduce_op import ReduceOp
from keras_hvd.backends.tensorflow.collectives import allreduce_op, submission
from keras_hvd.job import native, script_end


def submit(
    buckets: Sequence[Sequence[tf.Tensor]],
    names: Sequence[str],
    labels: Sequence[str],
    reduce_op: ReduceOp,
    process_set: int = 0,
) -> list[list[tf.Tensor]]:
    """Adds one op for all buckets to the graph; XLA sends buckets during backprop.

    On the other ranks, each bucket matches an allreduce of the same name and labels,
    compiled or not.
    """
    submission.require_compilable(f"gradients {names[0]!r}")
    script_end.note_collective()
    reduced = native.ops().keras_hvd_gradients(
        tensors=[tensor for bucket in buckets for tensor in bucket],
        bucket_sizes=[len(bucket) for bucket in buckets],
        tensor_names=list(names),
        labels=list(labels),
        reduce_op=int(reduce_op),
        process_set=process_set,
    )
    submission.run_independently(reduced[0])
    results = iter(reduced)
    return [list(itertools.islice(results, len(bucket))) for bucket in buckets]


def start_all(
    buckets: Sequence[Sequence[tf.Tensor]],
    names: Sequence[str],
    reduce_op: ReduceOp,
    process_set: int = 0,
    labels: Sequence[str] = (),
) -> list[list[tf.Tensor]]:
    """Starts an allreduce of each bucket once it is ready, and ends all in one op.

    On a GPU, only that last op has to wait for collectives.
    """
    handles = [
        start(bucket, name, reduce_op, process_set, of_bucket)
        for bucket, name, of_bucket in itertools.zip_longest(
            buckets, names, labels, fillvalue=""
        )
    ]
    reduced = done(handles, [[each.dtype for each in bucket] for bucket in buckets])
    results = iter(submission.continue_on_one_thread(reduced))
    return [list(itertools.islice(results, len(bucket))) for bucket in buckets]


def start(
    tensors: Sequence[tf.Tensor],
    name: str,
    reduce_op: ReduceOp,
    process_set: int = 0,
    labels: str = "",
) -> tf.Tensor:
    """Starts an allreduce of a group, and returns a handle for `done`."""
    return submission.submit(
        "start",
        submission.name_of("start", name),
        process_set,
        tensors=list(tensors),
        reduce_op=int(reduce_op),
        labels=labels,
    )


def done(
    handles: Sequence[tf.Tensor], dtypes: Sequence[Sequence[tf.DType]]
) -> list[tf.Tensor]:
    """Waits for started allreduces and returns their results; once for each handle.

    `dtypes` are the types of each handle's tensors.
    """
    reduced = native.ops().keras_hvd_done(
        handles=list(handles),
        T=[dtype for of_handle in dtypes for dtype in of_handle],
        sizes=[len(of_handle) for of_handle in dtypes],
    )
    submission.run_independently(reduced[0])
    return reduced


def are_on_gpu(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether tensors are on a GPU, or will be when the current graph runs.

    Example:

    >>> with tf.device("CPU:0"):
    ...     are_on_gpu([tf.constant(1.0)])
    False
    """
    names = {tensor.device for tensor in tensors}
    devices = {tf.DeviceSpec.from_string(name).device_type for name in names}
    if devices - {None}:
        return "GPU" in devices
    return bool(tf.config.list_logical_devices("GPU"))


# Gradients of reduced gradients, as in a gradient penalty. They equal those of an
# allreduce per bucket, and have the same names: other ranks may reduce that way.


@tf.RegisterGradient("KerasHvdGradients")
def _gradients_of_gradients(
    op: tf.Operation, *gradients: tf.Tensor
) -> list[tf.Tensor | None]:
    smooth = submission.smooth_gradients(op.outputs, gradients)
    results: list[tf.Tensor | None] = []
    sizes = op.get_attr("bucket_sizes")
    for size, name in zip(sizes, op.get_attr("tensor_names"), strict=True):
        of_bucket = _part(smooth, len(results), size)
        results += allreduce_op.reduced_alike(op, of_bucket, size, name)
    return results


@tf.RegisterGradient("KerasHvdStart")
def _gradients_of_start(op: tf.Operation, handle: tf.Tensor) -> list[tf.Tensor | None]:
    smooth = {i: each for i, each in enumerate(op.inputs) if each.dtype.is_floating}
    given = tf.raw_ops.OptionalGetValue(
        optional=handle,
        output_types=[each.dtype for each in smooth.values()],
        output_shapes=[each.shape for each in smooth.values()],
    )
    by_index = dict(zip(smooth, given, strict=True))
    return allreduce_op.reduced_alike(op, by_index, len(op.inputs))


@tf.RegisterGradient("KerasHvdDone")
def _gradients_of_done(
    op: tf.Operation, *gradients: tf.Tensor
) -> list[tf.Tensor | None]:
    """Packs each group's gradients into a tensor that the start's gradient unpacks."""
    smooth = submission.smooth_gradients(op.outputs, gradients)
    parts, first = [], 0
    for size in op.get_attr("sizes"):
        parts.append(list(_part(smooth, first, size).values()))
        first += size
    return [
        tf.raw_ops.OptionalFromValue(components=part) if part else None
        for part in parts
    ]


@tf.RegisterGradient("KerasHvdWholeStep")
def _gradients_of_whole_step(
    op: tf.Operation, *gradients: tf.Tensor | None
) -> list[tf.Tensor | None]:
    *of_tensors, _ = gradients
    return of_tensors


def _part(smooth: dict[int, tf.Tensor], first: int, size: int) -> dict[int, tf.Tensor]:
    """A bucket's gradients, by their index in the bucket."""
    places = range(first, first + size)
    return {i - first: smooth[i] for i in places if i in smooth}
