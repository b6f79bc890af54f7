"""Reduction of a step's gradients, bucket by bucket, in a program compiled by XLA."""

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
