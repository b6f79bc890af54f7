"""Reduction over all ranks: every rank gets the same result."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_hvd import basics, native
from keras_hvd.collectives import submission


class ReduceOp(enum.IntEnum):
    """How an allreduce combines the ranks' elements."""

    Average = 0
    Sum = 1
    Min = 2
    Max = 3
    Product = 4


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def allreduce(
    tensor: Any,
    op: ReduceOp | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a tensor element by element over all ranks.

    Differentiable for Sum and Average: the gradient is reduced in the same way.

    Args:
        tensor: a tensor, variable, array, list or number; `tf.IndexedSlices` become
            dense. The same shape and type on every rank.
        op: `keras_hvd.Average` (the default), `Sum`, `Min`, `Max` or `Product`.
            Integers are averaged towards zero; bool takes Min, Max and Product.
        name: matches the tensor to the other ranks'; by default the op's name in its
            `tf.function`.
        prescale_factor: multiplies each rank's elements before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        A tensor of the same shape and type, equal bit for bit on all ranks.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: the element type is not supported.
        ValueError: `op` is no reduction.
        tf.errors.InvalidArgumentError: the ranks' requests do not fit each other.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.allreduce([1.0, 2.0], op=keras_hvd.Sum, postscale_factor=10.0).numpy()
    array([10., 20.], dtype=float32)
    """
    basics.require_initialized("allreduce")
    tensor = submission.as_tensor("allreduce", tensor)
    name = submission.name_of("allreduce", name)
    return submit([tensor], name, _reduce_op(op), prescale_factor, postscale_factor)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    op: ReduceOp | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Reduces several tensors as one: all of them together, or none.

    Args:
        tensors: as for `allreduce`; types and shapes may be mixed.
        op: `keras_hvd.Average` (the default), `Sum`, `Min`, `Max` or `Product`.
        name: matches the group to the other ranks'; by default the op's name in its
            `tf.function`.
        prescale_factor: multiplies each rank's elements before the reduction.
        postscale_factor: multiplies the results.

    Returns:
        The results, in the order of `tensors`.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: an element type is not supported.
        ValueError: `op` is no reduction.
        tf.errors.InvalidArgumentError: the ranks' requests do not fit each other.
        tf.errors.AbortedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> [t.numpy().item() for t in keras_hvd.grouped_allreduce([1.5, 2], keras_hvd.Max)]
    [1.5, 2]
    """
    basics.require_initialized("grouped_allreduce")
    tensors = [submission.as_tensor("grouped_allreduce", tensor) for tensor in tensors]
    reduce_op = _reduce_op(op)
    if not tensors:
        return []
    name = submission.name_of("grouped_allreduce", name)
    return submit(tensors, name, reduce_op, prescale_factor, postscale_factor)


def submit(
    tensors: list[tf.Tensor],
    name: submission.Name,
    reduce_op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> list[tf.Tensor]:
    """Runs the op, or adds it to the graph: one for one tensor or for a group."""
    submission.require_compilable(f"allreduce {name.tensor!r}")
    reduced = native.ops().keras_hvd_allreduce(
        tensors=tensors,
        tensor_name=name.tensor,
        reduce_op=int(reduce_op),
        prescale=repr(float(prescale)),
        postscale=repr(float(postscale)),
        name=name.node,
    )
    if not tf.executing_eagerly():
        submission.run_independently(reduced[0].op)
    return reduced


def _reduce_op(op: ReduceOp | None) -> ReduceOp:
    if op is None:
        return Average
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(f"keras_hvd.{known.name}" for known in ReduceOp)
        raise ValueError(f"op must be one of {names}; got {op!r}") from None


@tf.RegisterGradient("KerasHvdAllreduce")
def _gradient(op: tf.Operation, *gradients: tf.Tensor) -> list[tf.Tensor | None]:
    """The same reduction of the gradients, of those outputs that have one."""
    reduce_op = ReduceOp(op.get_attr("reduce_op"))
    if reduce_op not in (Sum, Average):
        raise LookupError(
            f"allreduce {tf.compat.as_str(op.get_attr('tensor_name'))!r} with op="
            f"{reduce_op.name} has no gradient: only Sum and Average can be "
            "differentiated. Put tf.stop_gradient around it if none is wanted."
        )
    # Which ones is a matter of types alone, so that all ranks submit the same group.
    smooth = [i for i, output in enumerate(op.outputs) if output.dtype.is_floating]
    reduced = submit(
        [
            tf.zeros_like(op.outputs[i])
            if gradients[i] is None
            else tf.convert_to_tensor(gradients[i])
            for i in smooth
        ],
        submission.name_of_gradient(op),
        reduce_op,
        float(op.get_attr("prescale")),
        float(op.get_attr("postscale")),
    )
    by_index = dict(zip(smooth, reduced, strict=True))
    return [by_index.get(i) for i in range(len(op.outputs))]
