"""The op that reduces tensors over all ranks, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_hvd.backends.reduce_op import Adasum, Average, ReduceOp, Sum
from keras_hvd.backends.tensorflow.collectives import submission
from keras_hvd.job.process_sets import ProcessSet


def submit(
    tensors: list[tf.Tensor],
    name: submission.Name,
    reduce_op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
    kind: str = "allreduce",
) -> list[tf.Tensor]:
    """Runs one op for all tensors, or adds it to the graph.

    `kind` may be "reducescatter", whose op takes the same arguments.
    """
    results = submission.submit(
        kind,
        name,
        process_set,
        tensors=tensors,
        reduce_op=int(reduce_op),
        # A float attribute would lose the precision of a double.
        prescale=repr(float(prescale)),
        postscale=repr(float(postscale)),
    )
    return submission.continue_on_one_thread(results)


def require_supported(
    kind: str, op: ReduceOp, tensors: Sequence[tf.Tensor], process_set: ProcessSet
) -> None:
    """Raises if Adasum, which halves the ranks repeatedly, cannot reduce `tensors`.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> all_ranks = keras_hvd.global_process_set
    >>> require_supported("allreduce", Adasum, [tf.constant(1)], all_ranks)
    Traceback (most recent call last):
    TypeError: allreduce: Adasum takes tensors of floating types; got int32 of shape ()
    """
    if op != Adasum:
        return
    size = process_set.size()
    if size & (size - 1):
        raise NotImplementedError(
            f"{kind}: Adasum takes a number of ranks that is a power of 2, not {size}"
        )
    for tensor in tensors:
        if not tensor.dtype.is_floating:
            raise TypeError(
                f"{kind}: Adasum takes tensors of floating types; got "
                f"{tensor.dtype.name} of shape {tensor.shape}"
            )


def average_of_gradients(
    gradients: list[tf.Tensor], name: submission.Name, process_set: int
) -> list[tf.Tensor]:
    """Averages gradients over the ranks, including complex ones."""
    given = [
        submission.as_pairs(each) if each.dtype.is_complex else each
        for each in gradients
    ]
    averages = submit(given, name, Average, process_set=process_set)
    return [
        submission.from_pairs(average) if each.dtype.is_complex else average
        for each, average in zip(gradients, averages, strict=True)
    ]


@tf.RegisterGradient("KerasHvdAllreduce")
def _gradient(op: tf.Operation, *gradients: tf.Tensor) -> list[tf.Tensor | None]:
    """Reduces the gradients like the tensors, for outputs that have a gradient."""
    reduce_op = ReduceOp(op.get_attr("reduce_op"))
    if reduce_op not in (Sum, Average):
        raise LookupError(
            f"allreduce {tf.compat.as_str(op.get_attr('tensor_name'))!r} with op="
            f"{reduce_op.name} has no gradient: only Sum and Average can be "
            "differentiated. Put tf.stop_gradient around it if none is wanted."
        )
    smooth = submission.smooth_gradients(op.outputs, gradients)
    return reduced_alike(op, smooth, len(op.outputs))


def reduced_alike(
    op: tf.Operation,
    gradients: dict[int, tf.Tensor],
    size: int,
    name: str | None = None,
) -> list[tf.Tensor | None]:
    """Reduces the gradients of a group of `size` tensors as `op` reduced the tensors.

    Their keys are tensor indices. `name` is the group's, if the op has several groups.
    """
    if not gradients:
        return [None] * size
    reduced = submit(
        list(gradients.values()),
        submission.name_of_gradient(op, name),
        ReduceOp(op.get_attr("reduce_op")),
        float(op.get_attr("prescale")),
        float(op.get_attr("postscale")),
        op.get_attr("process_set"),
    )
    by_index = dict(zip(gradients, reduced, strict=True))
    return [by_index.get(i) for i in range(size)]
