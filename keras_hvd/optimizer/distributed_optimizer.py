"""DistributedOptimizer: a Keras optimizer that reduces its gradients over all ranks.

This module checks the user's arguments; `distributed_class` changes the optimizer.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import keras

from keras_hvd.backends.compression import Compressor, NoneCompressor
from keras_hvd.backends.current import framework, load
from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.backends.reduce_op import Average, ReduceOp
from keras_hvd.backends.variables import local_layers_of
from keras_hvd.job.process_sets import ProcessSet, global_process_set
from keras_hvd.optimizer import traced_steps
from keras_hvd.optimizer.distributed_class import Settings, distribute


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | None = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer reduce its gradients over all ranks, before clipping them.

    It works with `fit`, `train_on_batch`, a custom `train_step`, and a `GradientTape`
    with `apply` or `apply_gradients`. Configuration, state and saved files stay those
    of the plain optimizer. A saved model loads without keras_hvd. Wrapping an optimizer
    twice with the same arguments has no effect.

    The optimizer gets a method `register_local_var(variable)`. The gradients of such a
    variable stay on their rank, so each rank trains its own.

    Args:
        optimizer: a Keras 3 optimizer. It is changed in place and keeps its state. In a
            `MultiOptimizer` or `LossScaleOptimizer`, the inner optimizers reduce.
        name: prefix of the names that match gradients between ranks; by default the
            optimizer's own name.
        use_locking: ignored, as in Horovod.
        device_dense: ignored, as in Horovod.
        device_sparse: ignored, as in Horovod.
        compression: how gradients are compressed for sending:
            `keras_hvd.Compression.none`, `.fp16` or `.bf16`.
        sparse_as_dense: whether to make sparse gradients (`tf.IndexedSlices`, from
            `Embedding`) dense and reduce them with the others. By default the ranks
            gather all slices and add up equal rows. The step is the same.
        backward_passes_per_step: number of gradients that each rank adds up before one
            reduction and one update. Keras accumulates them: this argument sets
            `gradient_accumulation_steps`.
        op: `keras_hvd.Average`, `Sum` or `Adasum`.
        gradient_predivide_factor: gradients are divided by it before they are summed,
            and by `size() / gradient_predivide_factor` afterwards.
        average_aggregated_gradients: whether to average the gradients of
            `backward_passes_per_step` instead of adding them up.
        num_groups: old name of `groups`, as a number.
        groups: which gradients are sent together: a number of groups of about equal
            length, or lists of variables. Gradients in no list are grouped by size. By
            default all are.
        process_set: the ranks that train together; by default all of them. A rank
            outside trains alone.
        scale_local_gradients: whether to divide gradients of local variables by the
            number of ranks, as averaging divides the others.

    Returns:
        The same object.

    Raises:
        TypeError: `optimizer` is not a Keras 3 optimizer, or `compression` is not a
            compressor.
        ValueError: an argument is invalid, conflicts with another, or differs from an
            earlier call with this optimizer; or `backward_passes_per_step` differs from
            the optimizer's own `gradient_accumulation_steps`.
        RuntimeError: the call is in the scope of a `tf.distribute` strategy, which
            reduces gradients itself; or Keras runs on neither TensorFlow
            nor torch.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.001))
    >>> optimizer.name
    'adam'
    """
    del use_locking, device_dense, device_sparse
    _require_keras_optimizer(optimizer)
    framework.current_strategy.require_none(optimizer)
    traced_steps.install()
    reduction = GradientReduction.of_arguments(
        "DistributedOptimizer",
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if reduction.op.name == "Adasum" and average_aggregated_gradients:
        raise ValueError(
            "DistributedOptimizer: average_aggregated_gradients does not go with "
            "op=keras_hvd.Adasum, which decides on the scale of what it adds"
        )
    settings = Settings(
        reduction,
        name,
        _passes(backward_passes_per_step),
        bool(average_aggregated_gradients),
    )
    return distribute(optimizer, settings)


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | None = Average,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> keras.optimizers.Optimizer:
    """Like `DistributedOptimizer`, but keeps gradients of some layers on their rank.

    Each rank trains its own weights of these layers. `BroadcastGlobalVariables` gives
    all ranks the same initial weights, unless these are among its `local_variables`.

    Args:
        optimizer: as for `DistributedOptimizer`.
        name: as for `DistributedOptimizer`, like all others except `local_layers`.
        device_dense: the same.
        device_sparse: the same.
        compression: the same.
        sparse_as_dense: the same.
        gradient_predivide_factor: the same.
        op: the same.
        num_groups: the same.
        groups: the same.
        process_set: the same.
        local_layers: a Keras layer, or several; they may be built later.
        scale_local_gradients: the same.
        backward_passes_per_step: the same.
        average_aggregated_gradients: the same.

    Returns:
        The same object.

    Raises:
        TypeError: as for `DistributedOptimizer`.
        ValueError: something in `local_layers` is not a layer; also as for
            `DistributedOptimizer`.
        RuntimeError: as for `DistributedOptimizer`.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> head = keras.layers.Dense(2)
    >>> optimizer = keras_hvd.PartialDistributedOptimizer(
    ...     keras.optimizers.SGD(0.1), local_layers=[head])
    """
    local = local_layers_of("PartialDistributedOptimizer", local_layers)
    optimizer = DistributedOptimizer(
        optimizer,
        name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
    )
    optimizer._keep_local(local)
    return optimizer


def _passes(backward_passes_per_step: int) -> int:
    passes = operator.index(backward_passes_per_step)
    if passes < 1:
        raise ValueError(
            "DistributedOptimizer: backward_passes_per_step must be at least 1; got "
            f"{backward_passes_per_step!r}"
        )
    return passes


def _require_keras_optimizer(optimizer: Any) -> None:
    load()
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return
    if isinstance(optimizer, str):
        raise TypeError(
            "DistributedOptimizer takes a Keras 3 optimizer, not its name; got "
            f"{optimizer!r}. Use keras.optimizers.get({optimizer!r})."
        )
    framework.refuse_session_optimizer(optimizer)
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    what = "the class " if isinstance(optimizer, type) else "an instance of "
    raise TypeError(
        "DistributedOptimizer takes a Keras 3 optimizer (keras.optimizers.Optimizer); "
        f"got {what}{kind.__module__}.{kind.__qualname__}{_advice(kind)}"
    )


def _advice(kind: type) -> str:
    if not kind.__module__.startswith("tf_keras."):
        return ""
    return (
        ". tf_keras is Keras 2, and so is tf.keras with TF_USE_LEGACY_KERAS=1: write "
        "`import keras`, or unset that variable"
    )
