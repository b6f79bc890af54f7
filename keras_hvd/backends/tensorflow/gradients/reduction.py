"""Reduction of a step's gradients, for optimizers, tapes and strategies."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from keras_hvd.backends.compression import NoneCompressor
from keras_hvd.backends.gradient_reduction import KIND, GradientReduction
from keras_hvd.backends.labels import labels_of
from keras_hvd.backends.reduce_op import Average, Sum
from keras_hvd.backends.tensorflow.collectives import (
    allreduce_op,
    gradients,
    job_values,
    reductions,
    submission,
)
from keras_hvd.backends.tensorflow.collectives.allreduce import allreduce
from keras_hvd.backends.tensorflow.collectives.graph_names import name_in_graph
from keras_hvd.backends.tensorflow.gradients.repeated_rows import add_up, add_up_all
from keras_hvd.backends.variables import identity, path
from keras_hvd.job import arrival
from keras_hvd.job.process_sets import number_of
from keras_hvd.recording import recorder

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


def size_of(tensor: Any) -> int:
    """The bytes of a tensor, variable or slices; unknown dimensions count as 1.

    >>> size_of(tf.zeros([2, 3]))
    24
    """
    shape = tf.TensorShape(tensor.shape)
    elements = math.prod(n or 1 for n in shape) if shape.rank is not None else 0
    return elements * tf.as_dtype(tensor.dtype).size


def only_alone(reduction: GradientReduction) -> contextlib.AbstractContextManager:
    """A context whose ops run only in a job in which this rank is still alone.

    In any other, the function that is being traced in it fails.
    """
    number = number_of(reduction.process_set, KIND)
    checks = job_values.require_as_traced("size", process_set=number)
    return tf.control_dependencies(checks)


def install(terms_of: Callable[[Any], Any]) -> None:
    """Does nothing: a graph reduces each gradient as soon as it is there.

    Example:

    >>> install(lambda optimizer: None)
    """


def has_reduced(optimizer: Any) -> bool:
    """Whether the optimizer, in a loss scaling, gets gradients that are reduced: never.

    >>> has_reduced(None)
    False
    """
    del optimizer
    return False


def reduce(
    reduction: GradientReduction,
    prefix: str,
    grads: Sequence[Gradient],
    variables: Sequence[Any],
    local: Collection[int] = (),
    agreed: str = "",
) -> list[Gradient]:
    """Reduces the gradients of variables over the ranks.

    `prefix` begins the names that match gradients between ranks, in the order of
    `variables`, whose labels the ranks compare. `local` holds the `identity` of each
    variable whose gradients stay on their rank. `agreed` describes further settings
    that must be equal on all ranks.

    In the result, slices remain slices unless `sparse_as_dense`, and have each row
    once. Raises NotImplementedError for Adasum of slices, or with a number of ranks
    that is not a power of 2.
    """
    if recorder.scaling() == "meet":
        return _meet(reduction, prefix, grads)
    results = list(grads)
    dense, sparse = [], []
    for i, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
        if identity(variable) in local:
            results[i] = _scale_local(reduction, add_up_all(grad))
        elif isinstance(grad, tf.IndexedSlices) and not reduction.sparse_as_dense:
            _require_sum(reduction, f"{prefix}/{path(variable)}")
            sparse.append(i)
        else:
            dense.append(i)
    labels = labels_of([path(variables[i]) for i in dense + sparse])
    of_slices = [f"slices of {label}" for label in labels[len(dense) :]]
    # Slices come last, and only once the ranks agree on which gradients those are.
    with submission.leaving_thread():
        reduced = _reduce_dense(
            reduction,
            f"{prefix}/gradients",
            [grads[i] for i in dense],
            [variables[i] for i in dense],
            labels[: len(dense)],
            of_slices + [agreed] * bool(agreed),
        )
        for i, result in zip(dense, reduced):
            results[i] = result
        with tf.control_dependencies(reduced):
            for number, i in enumerate(sparse):
                results[i] = _reduce_slices(
                    reduction, f"{prefix}/slices/{number}", grads[i]
                )
    return results


def _meet(
    reduction: GradientReduction, prefix: str, grads: Sequence[Gradient]
) -> list[Gradient]:
    """Waits for the other ranks once the gradients are computed. Reduces nothing."""
    kept = [add_up_all(grad) for grad in grads]
    values = [
        each.values if isinstance(each, tf.IndexedSlices) else each for each in kept
    ]
    with submission.leaving_thread():
        with tf.control_dependencies(values):
            sent = tf.zeros([1])
        name = name_in_graph(f"{prefix}/meeting")
        [[met]] = reduce_buckets(reduction, [[sent]], [name], [""])
    # A session runs only what a result needs.
    with tf.control_dependencies([met]):
        return [tf.identity(each) for each in kept]


def _reduce_dense(reduction, prefix, grads, variables, labels, agreed):
    """Reduces dense gradients; `agreed` are labels besides theirs."""
    factor = reduction.gradient_predivide_factor
    if factor != 1:
        agreed = [*agreed, f"predivided by {factor!r}"]
    if not grads:
        # A rank without dense gradients compares labels, with a number for nothing.
        name = name_in_graph(f"{prefix}/0")
        [of_none] = reduce_buckets(
            reduction, [[tf.zeros([1])]], [name], ["\n".join(agreed)]
        )
        return of_none
    sent, contexts = _sent(reduction, grads)
    places = reduction.buckets(variables, [*map(size_of, variables)])
    results = reduce_buckets(
        reduction,
        [[sent[i] for i in bucket] for bucket in places],
        [name_in_graph(f"{prefix}/{number}") for number in range(len(places))],
        ["\n".join([*(labels[i] for i in bucket), *agreed]) for bucket in places],
    )
    reduced = list(grads)
    for bucket, bucket_results in zip(places, results, strict=True):
        for i, result in zip(bucket, bucket_results, strict=True):
            reduced[i] = result
    if contexts is None:
        return reduced
    decompress = reduction.compression.decompress
    return [
        _times(decompress(result, context), factor)
        for result, context in zip(reduced, contexts, strict=True)
    ]


def _sent(
    reduction: GradientReduction, grads: Sequence[Gradient]
) -> tuple[list[tf.Tensor], list[Any] | None]:
    """The tensors to send, and what restores each of them; None if nothing has to."""
    factor, compression = reduction.gradient_predivide_factor, reduction.compression
    if factor == 1 and compression is NoneCompressor:
        return [submission.as_tensor(KIND, grad) for grad in grads], None
    pairs = [
        compression.compress(_times(tf.convert_to_tensor(grad), 1 / factor))
        for grad in grads
    ]
    sent = [submission.as_tensor(KIND, tensor) for tensor, _ in pairs]
    return sent, [context for _, context in pairs]


def reduce_buckets(
    reduction: GradientReduction,
    tensors: list[list[tf.Tensor]],
    names: list[str],
    labels: list[str],
) -> list[list[tf.Tensor]]:
    """Reduces tensors; some ranks may compile this with XLA, others not."""
    op, process_set = reduction.op, reduction.process_set
    sums = op in (Average, Sum)
    number = number_of(process_set, KIND)
    if sums and submission.is_compiled():
        return gradients.submit(tensors, names, labels, op, number)
    every = [each for bucket in tensors for each in bucket]
    allreduce_op.require_supported(KIND, op, every, process_set)
    if sums and gradients.are_on_gpu(every):
        return gradients.start_all(tensors, names, op, number, labels)
    return [
        submission.submit(
            "allreduce",
            submission.name_of(KIND, name),
            number,
            tensors=bucket,
            reduce_op=int(op),
            labels=of_bucket,
        )
        for bucket, name, of_bucket in zip(tensors, names, labels, strict=True)
    ]


def _require_sum(reduction: GradientReduction, name: str) -> None:
    if reduction.op not in (Average, Sum):
        raise NotImplementedError(
            f"{name} has a sparse gradient, which op={reduction.op.name} cannot "
            "reduce: pass sparse_as_dense=True"
        )


def _reduce_slices(
    reduction: GradientReduction, prefix: str, grad: tf.IndexedSlices
) -> tf.IndexedSlices:
    """Gathers all ranks' slices; first adds up equal rows here, to send fewer."""
    with reductions.not_by_hand(), arrival.within_step():
        gathered = allreduce(
            add_up(grad),
            compression=reduction.compression,
            op=reduction.op,
            name=name_in_graph(prefix),
            process_set=reduction.process_set,
        )
    return add_up(gathered)


def _scale_local(reduction: GradientReduction, grad: Gradient) -> Gradient:
    """Scales a local gradient like the others, which are means over all ranks."""
    if not reduction.scale_local_gradients:
        return grad
    size = job_values.size_of(number_of(reduction.process_set, KIND))
    return divided(grad, size)


def divided(grad: Any, count: int | tf.Tensor) -> Any:
    """A tensor or slices, divided by a number in their own type."""
    if isinstance(grad, tf.IndexedSlices):
        values = divided(grad.values, count)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return grad / tf.cast(count, grad.dtype)


def _times(grad: tf.Tensor, factor: float) -> tf.Tensor:
    return grad if factor == 1 else grad * tf.cast(factor, grad.dtype)
