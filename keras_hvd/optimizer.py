"""DistributedOptimizer: a Keras optimizer that reduces its gradients over all ranks.

The optimizer stays the object it was: only its class changes, to one that extends its
own and looks like it, so that variables, state, configuration and saved files are the
plain optimizer's. Reductions sit in `_clip_gradients`, the one place that every shipped
optimizer passes exactly once for each real update, after the loss scale and gradient
accumulation, before clipping.
"""

from __future__ import annotations

import collections
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_hvd import basics
from keras_hvd.collectives import gradients, submission
from keras_hvd.collectives.allreduce import (
    Average,
    Max,
    Min,
    ReduceOp,
    Sum,
    allreduce,
    grouped_allreduce,
)

# Gradients leave in groups of about this size: large enough to be worth a collective,
# small enough that the last layers' travel while backprop works on the first.
_BUCKET_BYTES = 4 << 20


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer, *, op: ReduceOp | None = None
) -> keras.optimizers.Optimizer:
    """Makes an optimizer reduce its gradients over all ranks, before clipping them.

    It works under `fit`, `train_on_batch`, a custom `train_step` and a `GradientTape`
    with `apply` or `apply_gradients`. Configuration, state and saved files stay those
    of the plain optimizer; a saved model loads without keras_hvd. Wrapping twice does
    nothing. Sparse gradients (of `Embedding`) become dense.

    Args:
        optimizer: a Keras 3 optimizer; it is changed in place and keeps its state. Of
            a `MultiOptimizer` or `LossScaleOptimizer` the inner ones reduce.
        op: `keras_hvd.Average` (the default) or `keras_hvd.Sum`.

    Returns:
        The same object.

    Raises:
        TypeError: `optimizer` is not a Keras 3 optimizer.
        ValueError: `op` is another reduction, or differs from the one that the
            optimizer already has.
        RuntimeError: inside the scope of a `tf.distribute` strategy, which reduces
            gradients itself; or Keras does not run on TensorFlow.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.001))
    >>> optimizer.name
    'adam'
    """
    _require_keras_optimizer(optimizer)
    _require_no_strategy(optimizer)
    reduce_op = _gradient_op(op)
    if _is_distributing(optimizer):
        _require_same_op(optimizer, reduce_op)
        return optimizer
    _agree_on_finite_gradients()
    inner = inner_optimizers(optimizer)
    for each in inner or ():
        DistributedOptimizer(each, op=reduce_op)
    mixin = _ReducesGradients if inner is None else _DistributesInner
    optimizer.__class__ = _distributed_class(type(optimizer), mixin, reduce_op)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer reduces its gradients over all ranks.

    Args:
        optimizer: any object.

    Returns:
        True after `DistributedOptimizer`, and for a `LossScaleOptimizer` or
        `MultiOptimizer` all of whose inner optimizers are distributed.

    Example:

    >>> import keras
    >>> is_distributed(keras.optimizers.SGD())
    False
    >>> is_distributed(DistributedOptimizer(keras.optimizers.SGD()))
    True
    """
    inner = inner_optimizers(optimizer)
    if inner is None or not inner:
        return _is_distributing(optimizer)
    return all(is_distributed(each) for each in inner)


def inner_optimizers(optimizer: Any) -> list[keras.optimizers.Optimizer] | None:
    """The optimizers that one leaves the updates to.

    Args:
        optimizer: any object.

    Returns:
        A list, empty while a `MultiOptimizer` has not chosen any; None for an optimizer
        that does the updates itself.

    Example:

    >>> import keras
    >>> inner_optimizers(keras.optimizers.SGD()) is None
    True
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return [optimizer.inner_optimizer]
    if isinstance(optimizer, _multi_optimizer()):
        return list(optimizer.optimizers)
    return None


def leaf_optimizers(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """The optimizers that do the updates: the inner ones, or the optimizer itself.

    Args:
        optimizer: a Keras optimizer.

    Returns:
        A list.

    Example:

    >>> import keras
    >>> outer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(name="inner"))
    >>> [leaf.name for leaf in leaf_optimizers(outer)]
    ['inner']
    """
    inner = inner_optimizers(optimizer)
    if inner is None:
        return [optimizer]
    return [leaf for each in inner for leaf in leaf_optimizers(each)]


def before_first_update(
    optimizer: keras.optimizers.Optimizer, action: Callable[[], bool]
) -> None:
    """Has a distributed optimizer run something once it is built, before it updates.

    In a `tf.function` that is while the first step is traced, before it runs. Where
    that trace creates variables, TensorFlow initializes them after it and traces again;
    so the action says whether it is done, or is to be called again.

    Args:
        optimizer: a distributed optimizer.
        action: called without arguments, outside of the graph that is being traced,
            until it returns True; for each of several inner optimizers.
    """
    for each in leaf_optimizers(optimizer) or [optimizer]:
        vars(each)["_before_first_update"] = action


class _Distributed:
    """An optimizer whose class `DistributedOptimizer` has changed."""

    _plain_class: type
    _reduce_op: ReduceOp

    def __reduce__(self):
        # Keras pickles (and copies) a reference to the class, which here has no name of
        # its own, next to the saved optimizer.
        _, saved = super().__reduce__()
        return _unpickle, (self._plain_class, self._reduce_op, *saved)


class _ReducesGradients(_Distributed):
    """An optimizer that does the updates."""

    def apply_gradients(self, grads_and_vars):
        state = vars(self)
        before = state.get("_applied", 0)
        iterations = super().apply_gradients(list(grads_and_vars))
        if basics.size() > 1 and state.get("_applied", 0) == before:
            raise _not_reduced(self, "apply_gradients() updated without apply()")
        return iterations

    def apply(self, grads, trainable_variables=None):
        if basics.size() == 1 or not len(grads):
            _count_apply(self)
            return super().apply(grads, trainable_variables)
        if trainable_variables is None and not self.built:
            return super().apply(grads)  # which says what is missing
        _require_no_strategy(self)
        variables = list(trainable_variables or self._trainable_variables)
        _run_before_first_update(self, variables)
        grads = _reduce_overwriting(self, list(grads), variables)
        update = _Update(grads, variables)
        state = vars(self)
        state["_update"] = update
        try:
            result = super().apply(grads, trainable_variables)
        finally:
            del state["_update"]
        _count_apply(self)
        if update.reduced < update.expected and not _only_accumulated(self):
            raise _not_reduced(
                self,
                f"of {update.expected} gradients that apply() was given, "
                f"{update.reduced} were reduced",
            )
        return result

    def _backend_apply_gradients(self, grads, trainable_variables):
        update = vars(self).get("_update")
        if update is not None:
            update.variables = list(trainable_variables)
        return super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads):
        if basics.size() > 1:
            grads = self._reduce(list(grads))
        return super()._clip_gradients(grads)

    def _reduce(self, grads):
        update = vars(self).get("_update")
        if update is None or len(update.variables) != len(grads):
            raise _not_reduced(
                self,
                f"it clips {len(grads)} gradients, and which variables they belong to "
                "cannot be known",
            )
        update.reduced += len(grads)
        return _reduce_gradients(self.name, self._reduce_op, grads, update.variables)


class _DistributesInner(_Distributed):
    """An optimizer that leaves the updates to inner ones, chosen at build at last."""

    def build(self, variables):
        super().build(variables)
        for each in inner_optimizers(self):
            DistributedOptimizer(each, op=self._reduce_op)
        action = vars(self).pop("_before_first_update", None)
        if action is not None:
            before_first_update(self, action)


class _Update:
    """One call of `apply`: which gradients must be reduced, and how many were."""

    def __init__(self, grads: Sequence[Any], variables: Sequence[Any]):
        self.variables = [
            variable
            for grad, variable in zip(grads, variables)
            if grad is not None and not _is_overwritten(variable)
        ]
        self.expected = len(self.variables)
        self.reduced = 0


@functools.cache
def _distributed_class(plain: type, mixin: type, reduce_op: ReduceOp) -> type:
    """A subclass that Keras, and who saves or prints the optimizer, takes for `plain`.

    Keras serializes `obj.__class__`: with a class that was neither exported by Keras
    nor registered by the user, plain Keras could not load what was saved.
    """
    return type(
        plain.__name__,
        (mixin, plain),
        {
            "__class__": property(lambda self: plain),
            "__doc__": plain.__doc__,
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "_plain_class": plain,
            "_reduce_op": reduce_op,
        },
    )


def _unpickle(plain: type, reduce_op: ReduceOp, saved: Any):
    return DistributedOptimizer(plain._unpickle_model(saved), op=reduce_op)


def _reduce_gradients(
    prefix: str, reduce_op: ReduceOp, grads: list[Any], variables: Sequence[Any]
) -> list[tf.Tensor]:
    paths = _distinct_paths(variables)
    reduced = [tf.convert_to_tensor(grad) for grad in grads]
    buckets = list(_buckets([_bytes(variable) for variable in variables]))
    names = [
        _name_in_graph(f"{prefix}/gradients/{place}") for place in range(len(buckets))
    ]
    results = _reduce_buckets(
        [[reduced[i] for i in bucket] for bucket in buckets],
        names,
        [_mark_of([paths[i] for i in bucket]) for bucket in buckets],
        reduce_op,
    )
    for bucket, bucket_results in zip(buckets, results):
        for i, result in zip(bucket, bucket_results):
            reduced[i] = result
    return reduced


def _reduce_buckets(
    buckets: list[list[tf.Tensor]],
    names: list[str],
    marks: list[int],
    reduce_op: ReduceOp,
) -> list[list[tf.Tensor]]:
    """Reduces gradients; the ranks need not agree on having it compiled by XLA."""
    if submission.is_compiled():
        return gradients.submit(buckets, names, marks, reduce_op)
    return [
        grouped_allreduce(
            [*bucket, tf.zeros([0, mark], tf.uint8)], op=reduce_op, name=name
        )[:-1]
        for bucket, name, mark in zip(buckets, names, marks)
    ]


def _mark_of(paths: Sequence[str]) -> int:
    """The length of a tensor without elements that tells the variables of a bucket.

    Where a variable has a gradient on some ranks only, the buckets of the ranks hold
    different variables, perhaps of equal shapes. Shapes are compared between ranks, so
    this makes it an error, and costs nothing: there is nothing to reduce.
    """
    return zlib.crc32("\n".join(paths).encode()) & 0x7FFFFFFF


def _buckets(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Groups of indices, from the last to the first: the order backprop ends them in.

    >>> list(_buckets([1 << 20, 3 << 20, 9 << 20, 1 << 10]))
    [[3], [2], [1, 0]]
    """
    bucket, filled = [], 0
    for i in reversed(range(len(sizes))):
        if bucket and filled + sizes[i] > _BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(i)
        filled += sizes[i]
    if bucket:
        yield bucket


def _bytes(variable: Any) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def _distinct_paths(variables: Sequence[Any]) -> list[str]:
    """The variables' paths; those that several share get their place in the list."""
    paths = [_path(variable) for variable in variables]
    times = collections.Counter(paths)
    return [path if times[path] == 1 else f"{path}#{i}" for i, path in enumerate(paths)]


def _path(variable: Any) -> str:
    return getattr(variable, "path", None) or variable.name


def _name_in_graph(name: str) -> str:
    """The name, numbered where the graph that is being built has it already.

    Optimizers and variables of the same names in one `tf.function` (twins, copies) may
    reduce at the same time, in another order on each rank. Ranks that trace the program
    more often than others count the same, since each trace has a graph of its own.

    >>> @tf.function
    ... def step():
    ...     print(_name_in_graph("adam/w"), _name_in_graph("adam/w"))
    >>> step()
    adam/w adam/w#1
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    if not hasattr(graph, "_keras_hvd_names"):
        graph._keras_hvd_names = collections.Counter()
    names = graph._keras_hvd_names
    names[name] += 1
    return name if names[name] == 1 else f"{name}#{names[name] - 1}"


def _is_overwritten(variable: Any) -> bool:
    """Whether Keras assigns the gradient to the variable (scales of float8 layers)."""
    return getattr(variable, "overwrite_with_gradient", False)


def _reduce_overwriting(
    optimizer: Any, grads: list[Any], variables: Sequence[Any]
) -> list[Any]:
    """Reduces by maximum what Keras assigns to variables before it clips."""
    chosen = [
        i
        for i, (grad, variable) in enumerate(zip(grads, variables))
        if grad is not None and _is_overwritten(variable)
    ]
    if not chosen:
        return grads
    path = _path(variables[chosen[0]])
    name = _name_in_graph(f"{optimizer.name}/{path}/overwriting")
    for i, result in zip(
        chosen, grouped_allreduce([grads[i] for i in chosen], op=Max, name=name)
    ):
        grads[i] = result
    return grads


def _agree_on_finite_gradients() -> None:
    """Has Keras' loss scaling skip a step on all ranks if one has to.

    It looks at gradients before the inner optimizer reduces them. Patched on the class,
    because `compile` wraps optimizers in a `LossScaleOptimizer` without asking.
    """
    plain = keras.optimizers.LossScaleOptimizer.check_finite
    if hasattr(plain, "_keras_hvd"):
        return

    @functools.wraps(plain)
    def check_finite(self, grads):
        finite = plain(self, grads)
        if not is_distributed(self.inner_optimizer) or basics.size() == 1:
            return finite
        name = f"{self.name}/{self.inner_optimizer.name}/finite"
        return allreduce(finite, op=Min, name=_name_in_graph(name))

    check_finite._keras_hvd = True
    keras.optimizers.LossScaleOptimizer.check_finite = check_finite


def _run_before_first_update(optimizer: Any, variables: Sequence[Any]) -> None:
    action = vars(optimizer).get("_before_first_update")
    if action is None:
        return
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
    with tf.init_scope():
        if action():
            del vars(optimizer)["_before_first_update"]


def _count_apply(optimizer: Any) -> None:
    # Not an attribute that Keras would track, and not a variable: it only tells
    # apply_gradients() whether apply() was reached.
    state = vars(optimizer)
    state["_applied"] = state.get("_applied", 0) + 1


def _only_accumulated(optimizer: Any) -> bool:
    """Whether the `apply` that just ended had nothing to reduce (eager mode only)."""
    steps = optimizer.gradient_accumulation_steps
    return bool(
        steps and tf.executing_eagerly() and int(optimizer._iterations) % steps != 0
    )


def _is_distributing(optimizer: Any) -> bool:
    return isinstance(optimizer, _Distributed)


@functools.cache
def _multi_optimizer() -> tuple[type, ...]:
    """The class, or nothing where this Keras has none yet."""
    found = getattr(keras.optimizers, "MultiOptimizer", None)
    return (found,) if found else ()


def _gradient_op(op: ReduceOp | None) -> ReduceOp:
    if op is None:
        return Average
    if op not in (Average, Sum):
        raise ValueError(
            "DistributedOptimizer reduces gradients by keras_hvd.Average or "
            f"keras_hvd.Sum; got op={op!r}"
        )
    return ReduceOp(op)


def _require_same_op(optimizer: Any, reduce_op: ReduceOp) -> None:
    if optimizer._reduce_op != reduce_op:
        raise ValueError(
            f"optimizer {optimizer.name!r} is already distributed, with op="
            f"{optimizer._reduce_op.name}; it cannot be distributed again with op="
            f"{reduce_op.name}"
        )


def _require_keras_optimizer(optimizer: Any) -> None:
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            "keras_hvd works with Keras on TensorFlow; here it runs on "
            f"{keras.backend.backend()}. Set the environment variable "
            "KERAS_BACKEND=tensorflow, or the backend in keras.json."
        )
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return
    if isinstance(optimizer, str):
        raise TypeError(
            "DistributedOptimizer takes a Keras 3 optimizer, not its name; got "
            f"{optimizer!r}. Use keras.optimizers.get({optimizer!r})."
        )
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    what = "the class " if isinstance(optimizer, type) else "an instance of "
    raise TypeError(
        "DistributedOptimizer takes a Keras 3 optimizer (keras.optimizers.Optimizer); "
        f"got {what}{kind.__module__}.{kind.__qualname__}"
    )


def _require_no_strategy(optimizer: Any) -> None:
    created_in = getattr(optimizer, "_distribution_strategy", None)
    for strategy in (tf.distribute.get_strategy(), created_in):
        if strategy is None or strategy is _default_strategy():
            continue
        raise RuntimeError(
            f"optimizer {optimizer.name!r} is used inside the scope of "
            f"{type(strategy).__name__}, which reduces gradients itself: a "
            "DistributedOptimizer there would reduce twice. Use one of the two."
        )


@functools.cache
def _default_strategy() -> tf.distribute.Strategy:
    with tf.Graph().as_default():
        return tf.distribute.get_strategy()


def _not_reduced(optimizer: Any, what: str) -> RuntimeError:
    kind = type(optimizer)
    return RuntimeError(
        f"{kind.__module__}.{kind.__qualname__} {optimizer.name!r} is distributed, but "
        f"{what}: the ranks' weights would drift apart. DistributedOptimizer works "
        "with optimizers that update in update_step(), or that pass all gradients to "
        "super().apply(); where this one leaves updates to another optimizer, "
        "distribute that one instead."
    )
