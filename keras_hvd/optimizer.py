"""DistributedOptimizer: a Keras optimizer that reduces its gradients over all ranks.

The optimizer stays the object it was: only its class changes, to one that extends its
own and looks like it, so that variables, state, configuration and saved files are the
plain optimizer's. Reductions sit in `_clip_gradients`, the one place that every shipped
optimizer passes exactly once for each real update, after the loss scale and gradient
accumulation, before clipping.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_hvd.collectives.allreduce import (
    Average,
    Max,
    Min,
    ReduceOp,
    allreduce,
    grouped_allreduce,
)
from keras_hvd.compression import Compression, Compressor
from keras_hvd.gradient_reduction import (
    GradientReduction,
    name_in_graph,
    path,
    require_not_reduced,
)
from keras_hvd.local_variables import LocalVariables, local_layers_of
from keras_hvd.process_sets import ProcessSet, global_process_set


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What `DistributedOptimizer` was asked for."""

    reduction: GradientReduction
    # What begins the names of collectives; None: the optimizer's own name.
    name: str | None = None
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
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

    It works under `fit`, `train_on_batch`, a custom `train_step` and a `GradientTape`
    with `apply` or `apply_gradients`. Configuration, state and saved files stay those
    of the plain optimizer; a saved model loads without keras_hvd. Wrapping twice in
    the same way does nothing.

    The optimizer gets a method `register_local_var(variable)`: the gradients of such a
    variable stay on their rank, and each rank trains its own.

    Args:
        optimizer: a Keras 3 optimizer; it is changed in place and keeps its state. Of
            a `MultiOptimizer` or `LossScaleOptimizer` the inner ones reduce.
        name: begins the names that match gradients between ranks; by default the
            optimizer's own name.
        use_locking: without meaning; as in Horovod.
        device_dense: without meaning; as in Horovod.
        device_sparse: without meaning; as in Horovod.
        compression: what gradients travel as: `keras_hvd.Compression.none`, `.fp16` or
            `.bf16`.
        sparse_as_dense: whether sparse gradients (`tf.IndexedSlices`, of `Embedding`)
            become dense and are reduced with the others. By default the ranks gather
            each other's slices, as one process would get them for all the data.
        backward_passes_per_step: number of gradients that are added up on each rank
            before one reduction and one update. They are Keras' accumulated gradients:
            this sets `gradient_accumulation_steps`.
        op: `keras_hvd.Average` or `keras_hvd.Sum`.
        gradient_predivide_factor: gradients are divided by it before they are summed,
            and by `size() / gradient_predivide_factor` afterwards.
        average_aggregated_gradients: whether the gradients of
            `backward_passes_per_step` are averaged instead of added up.
        num_groups: the old name of a number of `groups`.
        groups: what travels together: a number of groups of about as many gradients
            each, or lists of variables, besides which others go by size. By default
            all go by size.
        process_set: the ranks that train together; by default all of them.
        scale_local_gradients: whether gradients of local variables are divided by the
            number of ranks, as those of the others are by averaging.

    Returns:
        The same object.

    Raises:
        TypeError: `optimizer` is not a Keras 3 optimizer, or `compression` not a
            compressor.
        ValueError: a value is wrong, does not go with another, or differs from what the
            optimizer was distributed with before; `backward_passes_per_step` differs
            from the optimizer's own `gradient_accumulation_steps`.
        RuntimeError: inside the scope of a `tf.distribute` strategy, which reduces
            gradients itself; or Keras does not run on TensorFlow.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.001))
    >>> optimizer.name
    'adam'
    """
    del use_locking, device_dense, device_sparse
    _require_keras_optimizer(optimizer)
    _require_no_strategy(optimizer)
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
    settings = _Settings(
        reduction,
        name,
        _passes(backward_passes_per_step),
        bool(average_aggregated_gradients),
    )
    return _distribute(optimizer, settings)


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
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
    """A distributed optimizer that leaves the gradients of some layers on their rank.

    Each rank trains its own weights of these layers. `BroadcastGlobalVariables` gives
    all ranks the same ones to begin with, unless it is told of them too.

    Args:
        optimizer: as for `DistributedOptimizer`.
        name: as for `DistributedOptimizer`, and so are the others but one.
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
        ValueError: something in `local_layers` is not a layer; what
            `DistributedOptimizer` raises.
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


def local_variables(
    optimizers: Sequence[keras.optimizers.Optimizer], variables: Sequence[Any]
) -> set[int]:
    """Which variables' gradients stay on their rank.

    Args:
        optimizers: distributed ones, or others, which know of none.
        variables: those to look at.

    Returns:
        The `gradient_reduction.identity` of each.

    Example:

    >>> import keras
    >>> optimizer = DistributedOptimizer(keras.optimizers.SGD())
    >>> variable = keras.Variable(1.0)
    >>> optimizer.register_local_var(variable)
    >>> len(local_variables([optimizer], [variable, keras.Variable(1.0)]))
    1
    """
    return {
        each
        for optimizer in optimizers
        if _is_distributing(optimizer)
        for local in optimizer._local
        for each in local.among(variables)
    }


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
    _settings: _Settings

    @property
    def _local(self) -> list[LocalVariables]:
        # Past Keras, which would track what an attribute holds. One that was made by
        # `type(optimizer).from_config` has none yet.
        return vars(self).setdefault("_keras_hvd_local", [])

    def register_local_var(self, var: Any) -> None:
        """Leaves the gradients of a variable on their rank.

        Args:
            var: a Keras variable or a `tf.Variable`.

        Raises:
            TypeError: it is something else.
        """
        self._keep_local(LocalVariables.of(var))

    def _keep_local(self, local: LocalVariables) -> None:
        self._local.append(local)
        for each in inner_optimizers(self) or ():
            each._keep_local(local)

    def __reduce__(self):
        # Keras pickles (and copies) a reference to the class, which here has no name of
        # its own, next to the saved optimizer.
        _, saved = super().__reduce__()
        paths = frozenset(each for local in self._local for each in local.paths())
        return _unpickle, (self._plain_class, self._settings, paths, *saved)


class _ReducesGradients(_Distributed):
    """An optimizer that does the updates."""

    def apply_gradients(self, grads_and_vars):
        state = vars(self)
        before = state.get("_applied", 0)
        iterations = super().apply_gradients(list(grads_and_vars))
        if not self._is_alone() and state.get("_applied", 0) == before:
            raise _not_reduced(self, "apply_gradients() updated without apply()")
        return iterations

    def apply(self, grads, trainable_variables=None):
        if self._is_alone() or not len(grads):
            _count_apply(self)
            return super().apply(grads, trainable_variables)
        if trainable_variables is None and not self.built:
            return super().apply(grads)  # which says what is missing
        _require_no_strategy(self)
        require_not_reduced(self, grads)
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
        if not self._is_alone():
            grads = self._reduce(list(grads))
        settings = self._settings
        if not settings.average_aggregated_gradients:
            # Keras averages what it accumulates.
            passes = settings.backward_passes_per_step
            grads = [grad * passes for grad in grads] if passes > 1 else grads
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
        variables = update.variables
        local = local_variables([self], variables)
        prefix = self._settings.name or self.name
        return self._settings.reduction.reduce(prefix, grads, variables, local)

    def _is_alone(self):
        return self._settings.reduction.is_alone()


class _DistributesInner(_Distributed):
    """An optimizer that leaves the updates to inner ones, chosen at build at last."""

    def apply(self, grads, trainable_variables=None):
        if not self._settings.reduction.is_alone():
            require_not_reduced(self, grads)
        return super().apply(grads, trainable_variables)

    def build(self, variables):
        super().build(variables)
        for each in inner_optimizers(self):
            if not _is_distributing(each):
                _distribute(each, self._settings, self._local)
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


def _distribute(
    optimizer: Any, settings: _Settings, local: Sequence[LocalVariables] = ()
) -> Any:
    if _is_distributing(optimizer):
        _require_same_settings(optimizer, settings)
        return optimizer
    _agree_on_finite_gradients()
    inner = inner_optimizers(optimizer)
    for each in inner or ():
        _distribute(each, settings, local)
    if inner is None:
        _accumulate(optimizer, settings.backward_passes_per_step)
    mixin = _ReducesGradients if inner is None else _DistributesInner
    optimizer.__class__ = _distributed_class(type(optimizer), mixin, settings)
    optimizer._local.extend(local)
    return optimizer


@functools.cache
def _distributed_class(plain: type, mixin: type, settings: _Settings) -> type:
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
            "_settings": settings,
        },
    )


def _unpickle(plain: type, settings: _Settings, local_paths: frozenset, saved: Any):
    local = LocalVariables(local_paths=local_paths)
    return _distribute(plain._unpickle_model(saved), settings, [local])


def _accumulate(optimizer: Any, passes: int) -> None:
    """Has Keras accumulate the gradients of several passes."""
    steps = optimizer.gradient_accumulation_steps or 1
    if passes in (1, steps):
        return
    if steps > 1:
        raise ValueError(
            f"optimizer {optimizer.name!r} has gradient_accumulation_steps={steps}, "
            f"and DistributedOptimizer was given backward_passes_per_step={passes}: "
            "they are the same thing, so give one of them"
        )
    optimizer.gradient_accumulation_steps = passes
    if tf.executing_eagerly():
        # What counted updates counts passes from now on. While a step is traced, the
        # optimizer is a new one, and this would be done again in each step.
        optimizer._iterations.assign(optimizer._iterations * passes)
    if optimizer.built:
        _add_accumulators(optimizer)


def _add_accumulators(optimizer: Any) -> None:
    """Adds what `build` would have, in its place: files number an optimizer's state."""
    tracked = optimizer._variables
    first_slot = len(optimizer._trainable_variables) if optimizer.use_ema else 0
    first_slot += 1 + isinstance(optimizer._learning_rate, keras.Variable)
    slots = tracked[first_slot:]
    del tracked[first_slot:]
    vars(optimizer)["_accumulated_gradients"] = [
        optimizer.add_variable_from_reference(each, name="gradient_accumulator")
        for each in optimizer._trainable_variables
    ]
    tracked.extend(slots)


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
    first = path(variables[chosen[0]])
    name = name_in_graph(f"{optimizer.name}/{first}/overwriting")
    maxima = grouped_allreduce(
        [grads[i] for i in chosen],
        op=Max,
        name=name,
        process_set=optimizer._settings.reduction.process_set,
    )
    for i, result in zip(chosen, maxima, strict=True):
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
        inner = self.inner_optimizer
        if not is_distributed(inner):
            return finite
        reduction = (leaf_optimizers(inner) or [inner])[0]._settings.reduction
        if reduction.is_alone():
            return finite
        name = name_in_graph(f"{self.name}/{inner.name}/finite")
        return allreduce(finite, op=Min, name=name, process_set=reduction.process_set)

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


def _passes(backward_passes_per_step: int) -> int:
    passes = operator.index(backward_passes_per_step)
    if passes < 1:
        raise ValueError(
            "DistributedOptimizer: backward_passes_per_step must be at least 1; got "
            f"{backward_passes_per_step!r}"
        )
    return passes


def _require_same_settings(optimizer: Any, settings: _Settings) -> None:
    has = optimizer._settings
    if has == settings:
        return
    differing = has.reduction.differences(settings.reduction) or " and ".join(
        ", ".join(
            f"{field.name}={getattr(each, field.name)!r}"
            for field in dataclasses.fields(_Settings)
            if getattr(has, field.name) != getattr(settings, field.name)
        )
        for each in (has, settings)
    )
    raise ValueError(
        f"optimizer {optimizer.name!r} is already distributed, in another way than "
        f"asked for now: {differing}"
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
