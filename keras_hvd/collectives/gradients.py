"""Reduction of a step's gradients, bucket by bucket, while backprop goes on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf

from keras_hvd import native
from keras_hvd.collectives import submission
from keras_hvd.collectives.allreduce import ReduceOp


def submit(
    buckets: Sequence[Sequence[tf.Tensor]],
    names: Sequence[str],
    marks: Sequence[int],
    reduce_op: ReduceOp,
    process_set: int = 0,
) -> list[list[tf.Tensor]]:
    """Adds the op to the graph: one for all buckets, which XLA lets travel meanwhile.

    Each bucket meets an allreduce of its name on the other ranks, compiled or not, that
    ends with a tensor of uint8 of the shape [0, mark].
    """
    submission.require_compilable(f"gradients {names[0]!r}")
    reduced = native.ops().keras_hvd_gradients(
        tensors=[tensor for bucket in buckets for tensor in bucket],
        bucket_sizes=[len(bucket) for bucket in buckets],
        tensor_names=list(names),
        marks=list(marks),
        reduce_op=int(reduce_op),
        process_set=process_set,
    )
    submission.run_independently(reduced[0].op)
    results = iter(reduced)
    return [list(itertools.islice(results, len(bucket))) for bucket in buckets]


def start_all(
    buckets: Sequence[Sequence[tf.Tensor]],
    names: Sequence[str],
    reduce_op: ReduceOp,
    process_set: int = 0,
) -> list[list[tf.Tensor]]:
    """Starts an allreduce for each bucket when it is there, and ends all as one.

    On a GPU nothing but the end of all has to wait for a collective.
    """
    handles = [
        start(bucket, name, reduce_op, process_set)
        for bucket, name in zip(buckets, names, strict=True)
    ]
    reduced = done(handles, [tensor.dtype for bucket in buckets for tensor in bucket])
    results = iter(reduced)
    return [list(itertools.islice(results, len(bucket))) for bucket in buckets]


def start(
    tensors: Sequence[tf.Tensor], name: str, reduce_op: ReduceOp, process_set: int = 0
) -> tf.Tensor:
    """Starts an allreduce of a group, for `done`, which gets what this returns."""
    names = submission.name_of("start", name)
    handle = native.ops().keras_hvd_start(
        tensors=list(tensors),
        reduce_op=int(reduce_op),
        process_set=process_set,
        tensor_name=names.tensor,
        name=names.node,
    )
    if not tf.executing_eagerly():
        submission.run_independently(handle.op)
    return handle


def done(handles: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    """What has been started, when all of it has ended; once for each handle."""
    reduced = native.ops().keras_hvd_done(handles=list(handles), T=list(dtypes))
    if not tf.executing_eagerly():
        submission.run_independently(reduced[0].op)
    return reduced


def are_on_gpu(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether tensors are on a GPU, or will be in the graph that is being built."""
    names = {tensor.device for tensor in tensors}
    devices = {tf.DeviceSpec.from_string(name).device_type for name in names}
    if devices - {None}:
        return "GPU" in devices
    return bool(tf.config.list_logical_devices("GPU"))
