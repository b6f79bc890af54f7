"""Reduction and concatenation of any values that a `tf.distribute` user passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_hvd.backends import buckets
from keras_hvd.backends.reduce_op import Average, Sum
from keras_hvd.backends.tensorflow.collectives import contributions, submission
from keras_hvd.backends.tensorflow.collectives.allgather import grouped_allgather
from keras_hvd.backends.tensorflow.collectives.allreduce import grouped_allreduce
from keras_hvd.backends.tensorflow.gradients.reduction import divided, size_of
from keras_hvd.job.process_sets import ProcessSet
from keras_hvd.strategy import no_rows

# Types that the engine lacks, with a type that holds all their values. Cast back, its
# sums wrap around like those of the original type.
_WIDER = {tf.int16: tf.int64, tf.uint16: tf.int64}

# Converts a result from the form that was sent to the form that is wanted.
_Restore = Callable[[Any], Any]


def all_reduce(
    reduce_op: tf.distribute.ReduceOp,
    values: Sequence[Any],
    process_set: ProcessSet,
    name: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduces values over the ranks, with one collective per bucket.

    They are tensors, variables, numbers or `tf.IndexedSlices`, with the same shapes and
    types on every rank. The mean of integers is a float, as in `tf.distribute`. Values
    from rows that a rank lacks are left out.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> values = [1, tf.constant(2.0)]
    >>> mean = tf.distribute.ReduceOp.MEAN
    >>> all_reduce(mean, values, keras_hvd.global_process_set)[0].numpy().item()
    1.0
    """
    op = Sum if reduce_op == tf.distribute.ReduceOp.SUM else Average
    counts = no_rows.ranks_that_count()
    if op == Sum:
        own = [no_rows.without_foreign(each) for each in values]
    else:
        own = [no_rows.zero_unless(counts, each) for each in values]
    pairs = [_reducible(reduce_op, each) for each in own]
    sent = [tensor for tensor, _ in pairs]
    reduced: list[Any] = []
    parts = buckets.by_size([*map(size_of, sent)], last_first=False)
    for number, part in enumerate(parts):
        with contributions.as_given():
            reduced += grouped_allreduce(
                [sent[i] for i in part],
                op=op,
                name=f"{name}/{number}" if name and number else name,
                process_set=process_set,
            )
    results = [back(each) for (_, back), each in zip(pairs, reduced, strict=True)]
    if op == Sum or counts is None:
        return results
    name = f"{name}/ranks" if name else None
    return of_ranks_with_rows(results, counts, process_set, name)


def of_ranks_with_rows(
    means: Sequence[Any], has_rows: tf.Tensor, process_set: ProcessSet, name: str | None
) -> list[Any]:
    """The means over the ranks with rows, from means with zeros for the others."""
    with submission.on_cpu(), contributions.as_given():
        [part] = grouped_allreduce(
            [tf.cast(has_rows, tf.float64)],
            op=Average,
            name=name,
            process_set=process_set,
        )
    return [divided(each, part) for each in means]


def all_gather(
    values: Sequence[Any],
    axis: int | tf.Tensor,
    process_set: ProcessSet,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Concatenates the ranks' tensors along a dimension, several tensors as one group.

    As in `tf.distribute`, the gradient is this rank's part of the sum of all ranks'
    gradients. Raises TypeError if a type cannot be sent, and ValueError if a value is a
    scalar or has no such dimension.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> values = [tf.ones([1, 2]), tf.ones([3, 4])]
    >>> gathered = all_gather(values, 1, keras_hvd.global_process_set)
    >>> [each.shape.as_list() for each in gathered]
    [[1, 2], [3, 4]]
    """
    tensors = map(tf.convert_to_tensor, values)
    own = [no_rows.own_part(each, axis) for each in tensors]
    pairs = [_gatherable(each, axis, process_set.size()) for each in own]
    sent = [tensor for tensor, _ in pairs]
    with contributions.as_given():
        gathered = grouped_allgather(sent, name=name, process_set=process_set)
    return [back(each) for (_, back), each in zip(pairs, gathered, strict=True)]


def _reducible(
    reduce_op: tf.distribute.ReduceOp, value: Any
) -> tuple[tf.Tensor | tf.IndexedSlices, _Restore]:
    """Converts a value to one that the engine can reduce; also returns the way back."""
    if isinstance(value, tf.IndexedSlices):
        values, back = _reducible(reduce_op, value.values)
        slices = tf.IndexedSlices(values, value.indices, value.dense_shape)
        return slices, lambda result: tf.IndexedSlices(
            back(result.values), result.indices, result.dense_shape
        )
    tensor = tf.convert_to_tensor(value)
    dtype = tensor.dtype
    if dtype.is_complex:
        return submission.as_pairs(tensor), submission.from_pairs
    if reduce_op == tf.distribute.ReduceOp.MEAN and dtype.is_integer:
        return tf.cast(tensor, tf.float64), _same
    if dtype in _WIDER:
        return tf.cast(tensor, _WIDER[dtype]), lambda result: tf.cast(result, dtype)
    return tensor, _same


def _gatherable(
    tensor: tf.Tensor, axis: int | tf.Tensor, size: int
) -> tuple[tf.Tensor, _Restore]:
    """Converts a tensor to one that can be gathered by rows, with the way back."""
    if tensor.shape.rank == 0:
        raise ValueError(
            "all_gather joins tensors along a dimension, and a scalar has none: give "
            f"it one, with tf.expand_dims(x, 0); got {tensor}"
        )
    there, back_again = _axis_first(tensor, axis)
    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        tensor = _gradient_times(tensor, size)
    return there(tensor), back_again


def _axis_first(tensor: tf.Tensor, axis: int | tf.Tensor) -> tuple[_Restore, _Restore]:
    """Functions that move a dimension to the front, and back."""
    known = tf.get_static_value(axis) if tf.is_tensor(axis) else axis
    rank = tensor.shape.rank
    if known is None or rank is None:
        axis = tf.convert_to_tensor(axis)
        dynamic_rank = tf.cast(tf.rank(tensor), axis.dtype)
        axis = tf.where(axis < 0, axis + dynamic_rank, axis)
        before, after = tf.range(axis), tf.range(axis + 1, dynamic_rank)
        to_front = tf.concat([[axis], before, after], 0)
        return (
            lambda x: tf.transpose(x, to_front),
            lambda x: tf.transpose(x, tf.math.invert_permutation(to_front)),
        )
    if not -rank <= known < rank:
        raise ValueError(
            f"all_gather: axis must be a dimension of the tensor; got axis={known} and "
            f"shape {tensor.shape}"
        )
    place = int(known) % rank
    if place == 0:
        return _same, _same
    to_front = [place, *range(place), *range(place + 1, rank)]
    back = [*range(1, place + 1), 0, *range(place + 1, rank)]
    return lambda x: tf.transpose(x, to_front), lambda x: tf.transpose(x, back)


def _gradient_times(tensor: tf.Tensor, factor: int) -> tf.Tensor:
    """The same tensor with its gradient multiplied by `factor`."""

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda gradient: gradient * tf.cast(factor, x.dtype)

    return identity(tensor)


def _same(value: Any) -> Any:
    return value
