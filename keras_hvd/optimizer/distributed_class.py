"""The class that a distributed optimizer has.

The optimizer stays the object it was: only its class changes, to one that extends its
own and looks like it, so that variables, state, configuration and saved files are the
plain optimizer's. Reductions sit in `_clip_gradients`, the one place that every shipped
optimizer passes exactly once for each real update, after the loss scale and gradient
accumulation, before clipping.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_hvd import guarded_saving
from keras_hvd.collectives.allreduce import grouped_allreduce
from keras_hvd.collectives.allreduce_op import Max
from keras_hvd.mixin import Mixin
from keras_hvd.optimizer.gradient_accumulation import accumulate, only_accumulated
from keras_hvd.optimizer.gradient_reduction import (
    GradientReduction,
    name_in_graph,
    path,
    require_not_reduced,
    shown,
)
from keras_hvd.optimizer.local_variables import LocalVariables
from keras_hvd.optimizer.loss_scaling import agree_on_finite_gradients
from keras_hvd.optimizer.nested_optimizers import inner_optimizers, leaf_optimizers
from keras_hvd.optimizer.repeated_rows import add_up_all
from keras_hvd.runtime.process_sets import ProcessSet, global_process_set


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `DistributedOptimizer` was asked for."""

    reduction: GradientReduction
    # What begins the names of collectives; None: the optimizer's own name.
    name: str | None = None
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False

    @property
    def passes(self) -> str:
        """What is made of several passes, in words; empty where there is one."""
        if self.backward_passes_per_step == 1:
            return ""
        how = "averaged" if self.average_aggregated_gradients else "added up"
        return f"{self.backward_passes_per_step} passes {how}"


def distribute(
    optimizer: Any, settings: Settings, local: Sequence[LocalVariables] = ()
) -> Any:
    """Has an optimizer, or those inside of it, reduce gradients.

    Args:
        optimizer: a Keras optimizer; its class changes.
        settings: how it is to reduce them.
        local: variables whose gradients stay on their rank.

    Returns:
        The same object.

    Raises:
        ValueError: it reduces them in another way already, or accumulates another
            number of them.

    Example:

    >>> import keras
    >>> settings = Settings(GradientReduction(), name="mine")
    >>> is_distributed(distribute(keras.optimizers.SGD(), settings))
    True
    """
    if _is_distributing(optimizer):
        _require_same_settings(optimizer, settings)
        return optimizer
    guarded_saving.install()
    agree_on_finite_gradients(_reduction_of)
    inner = inner_optimizers(optimizer)
    for each in inner or ():
        distribute(each, settings, local)
    if inner is None:
        accumulate(optimizer, settings.backward_passes_per_step)
    mixin = _ReducesGradients if inner is None else _DistributesInner
    plain: type = type(optimizer)
    optimizer.__class__ = _distributed_class(plain, mixin, settings)
    optimizer._local.extend(local)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer reduces its gradients over all ranks.

    Args:
        optimizer: any object.

    Returns:
        True after `DistributedOptimizer`, and for a `LossScaleOptimizer` or
        `MultiOptimizer` all of whose inner optimizers are distributed.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> is_distributed(keras.optimizers.SGD())
    False
    >>> is_distributed(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()))
    True
    """
    inner = inner_optimizers(optimizer)
    if inner is None or not inner:
        return _is_distributing(optimizer)
    return all(is_distributed(each) for each in inner)


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

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD())
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


def shared_settings(optimizer: Any) -> dict[str, str]:
    """What a distributed optimizer was asked for that all its ranks must agree on.

    Args:
        optimizer: any object.

    Returns:
        Values by argument, as they are to be shown; empty if it is not distributed.
        Of an optimizer that leaves the updates to others, those of the first of these.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> optimizer = keras_hvd.DistributedOptimizer(
    ...     keras.optimizers.SGD(), op=keras_hvd.Sum)
    >>> shared_settings(optimizer)["op"]
    'Sum'
    """
    if not _is_distributing(optimizer):
        # compile() puts a LossScaleOptimizer around one.
        inner = inner_optimizers(optimizer) or ()
        return next(filter(None, map(shared_settings, inner)), {})
    settings = optimizer._settings
    values = {**vars(settings.reduction), **vars(settings)}
    # Sets train side by side, and what is local differs by its nature.
    for each in ("reduction", "process_set", "scale_local_gradients"):
        del values[each]
    return {argument: shown(value) for argument, value in values.items()}


def reduces_with(optimizer: Any) -> ProcessSet:
    """The ranks whose gradients a distributed optimizer reduces with this rank's.

    Args:
        optimizer: a distributed optimizer that does the updates itself.

    Returns:
        A process set.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> reduces_with(keras_hvd.DistributedOptimizer(keras.optimizers.SGD())).ranks
    [0]
    """
    return optimizer._settings.reduction.process_set


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


def require_no_strategy(optimizer: Any) -> None:
    """Raises where a `tf.distribute` strategy would reduce gradients as well.

    Args:
        optimizer: a Keras optimizer.

    Raises:
        RuntimeError: it was made in the scope of a strategy, or is used in one.

    Example:

    >>> import keras
    >>> require_no_strategy(keras.optimizers.SGD())
    """
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


class _Distributed(Mixin):
    """An optimizer whose class `DistributedOptimizer` has changed."""

    _plain_class: type
    _settings: Settings

    @property
    def _local(self) -> list[LocalVariables]:
        # Past Keras, which would track what an attribute holds. One that was made by
        # `type(optimizer).from_config` has none yet.
        return self.__dict__.setdefault("_keras_hvd_local", [])

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
        require_no_strategy(self)
        require_not_reduced(self, grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        variables = trainable_variables or list(self._trainable_variables)
        _run_before_first_update(self, variables)
        process_set = self._settings.reduction.process_set
        grads = reduce_overwriting(self.name, list(grads), variables, process_set)
        update = _Update(grads, variables)
        state = self.__dict__
        state["_update"] = update
        try:
            result = super().apply(grads, trainable_variables)
        finally:
            del state["_update"]
        _count_apply(self)
        if update.reduced < update.expected and not only_accumulated(self):
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
        grads = list(grads)
        grads = add_up_all(grads) if self._is_alone() else self._reduce(grads)
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
        settings = self._settings
        prefix = settings.name or self.name
        return settings.reduction.reduce(
            prefix, grads, variables, local, settings.passes
        )

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
        for each in inner_optimizers(self) or ():
            if not _is_distributing(each):
                distribute(each, self._settings, self._local)
        action = self.__dict__.pop("_before_first_update", None)
        if action is not None:
            before_first_update(self, action)


class _Update:
    """One call of `apply`: which gradients must be reduced, and how many were."""

    def __init__(self, grads: Sequence[Any], variables: Sequence[Any]):
        self.variables = [
            variable
            for grad, variable in zip(grads, variables)
            if grad is not None and not is_overwritten(variable)
        ]
        self.expected = len(self.variables)
        self.reduced = 0


@functools.cache
def _distributed_class(plain: type, mixin: type, settings: Settings) -> type:
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


def _unpickle(
    plain: type[Any], settings: Settings, local_paths: frozenset, saved: Any
) -> Any:
    local = LocalVariables(local_paths=local_paths)
    return distribute(plain._unpickle_model(saved), settings, [local])


def _require_same_settings(optimizer: Any, settings: Settings) -> None:
    has = optimizer._settings
    if has == settings:
        return
    differing = has.reduction.differences(settings.reduction) or " and ".join(
        ", ".join(
            f"{field.name}={getattr(each, field.name)!r}"
            for field in dataclasses.fields(Settings)
            if getattr(has, field.name) != getattr(settings, field.name)
        )
        for each in (has, settings)
    )
    raise ValueError(
        f"optimizer {optimizer.name!r} is already distributed, in another way than "
        f"asked for now: {differing}"
    )


def _reduction_of(optimizer: Any) -> GradientReduction | None:
    """How an optimizer's gradients are reduced; None if they are not."""
    if not is_distributed(optimizer):
        return None
    return (leaf_optimizers(optimizer) or [optimizer])[0]._settings.reduction


def is_overwritten(variable: Any) -> bool:
    """Whether Keras assigns the gradient to the variable (scales of float8 layers).

    Args:
        variable: any variable.

    Returns:
        True if it does.

    Example:

    >>> is_overwritten(keras.Variable(1.0))
    False
    """
    return getattr(variable, "overwrite_with_gradient", False)


def reduce_overwriting(
    prefix: str,
    grads: list[Any],
    variables: Sequence[Any],
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduces by maximum what Keras assigns to variables before it clips.

    Args:
        prefix: begins the name that matches them to the other ranks'.
        grads: a gradient, or None, for each variable; changed in place.
        variables: what they are the gradients of.
        process_set: the ranks that reduce together.

    Returns:
        The same list.

    Example:

    >>> reduce_overwriting("sgd", [None], [keras.Variable(1.0)])
    [None]
    """
    chosen = [
        i
        for i, (grad, variable) in enumerate(zip(grads, variables))
        if grad is not None and is_overwritten(variable)
    ]
    if not chosen:
        return grads
    maxima = grouped_allreduce(
        [grads[i] for i in chosen],
        op=Max,
        name=name_in_graph(f"{prefix}/{path(variables[chosen[0]])}/overwriting"),
        process_set=process_set,
    )
    for i, result in zip(chosen, maxima, strict=True):
        grads[i] = result
    return grads


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


def _is_distributing(optimizer: Any) -> bool:
    return isinstance(optimizer, _Distributed)


def _not_reduced(optimizer: Any, what: str) -> RuntimeError:
    kind = type(optimizer)
    return RuntimeError(
        f"{kind.__module__}.{kind.__qualname__} {optimizer.name!r} is distributed, but "
        f"{what}: the ranks' weights would drift apart. DistributedOptimizer works "
        "with optimizers that update in update_step(), or that pass all gradients to "
        "super().apply(); where this one leaves updates to another optimizer, "
        "distribute that one instead."
    )
