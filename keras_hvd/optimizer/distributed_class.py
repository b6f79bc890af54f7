"""The class of a distributed optimizer.

The optimizer stays the same object. Only its class changes, to a subclass of its own
class that looks like it. So variables, state, configuration and saved files stay those
of the plain optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_hvd.backends.current import framework
from keras_hvd.backends.gradient_reduction import GradientReduction, shown
from keras_hvd.backends.labels import labels_of, name_in_program
from keras_hvd.backends.variables import LocalVariables
from keras_hvd.job.process_sets import ProcessSet, number_of
from keras_hvd.mixin import Mixin
from keras_hvd.optimizer import retracing
from keras_hvd.optimizer.gradient_accumulation import accumulate
from keras_hvd.optimizer.loss_scaling import agree_on_finite_gradients
from keras_hvd.optimizer.nested_optimizers import inner_optimizers, leaf_optimizers
from keras_hvd.optimizer.update_hook import UpdateHook

_changes = 0


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `DistributedOptimizer`."""

    reduction: GradientReduction
    # The prefix of collective names; None means the optimizer's own name.
    name: str | None = None
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False

    @property
    def passes(self) -> str:
        """How gradients of several passes are combined, in words; empty for one."""
        if self.backward_passes_per_step == 1:
            return ""
        how = "averaged" if self.average_aggregated_gradients else "added up"
        return f"{self.backward_passes_per_step} passes {how}"


def distribute(
    optimizer: Any, settings: Settings, local: Sequence[LocalVariables] = ()
) -> Any:
    """Makes an optimizer, or its inner optimizers, reduce gradients; changes its class.

    Raises ValueError if it already reduces them with other settings, or accumulates a
    different number of them.

    Example:

    >>> import keras
    >>> settings = Settings(GradientReduction(), name="mine")
    >>> is_distributed(distribute(keras.optimizers.SGD(), settings))
    True
    """
    if _is_distributing(optimizer):
        _require_same_settings(optimizer, settings)
        return optimizer
    framework.guarded_saving.install()
    framework.random_numbers.install(is_distributed)
    retracing.install()
    agree_on_finite_gradients(_reduction_of)
    framework.reduction.install(_terms_of)
    inner = inner_optimizers(optimizer)
    for each in inner or ():
        distribute(each, settings, local)
    if inner is None:
        accumulate(optimizer, settings.backward_passes_per_step)
    plain: type = type(optimizer)
    optimizer.__class__ = _distributed_class(plain, inner is None, settings)
    optimizer._own.local.extend(local)
    _note_change(optimizer)
    return optimizer


def changes() -> int:
    """Returns how often this process has changed some optimizer's reduction.

    >>> changes() >= 0
    True
    """
    return _changes


def held_by_traces(optimizer: Any) -> tuple[Any, ...]:
    """The facts about an optimizer's reduction that a traced step holds.

    >>> import keras
    >>> held_by_traces(keras.optimizers.SGD()) == held_by_traces(keras.optimizers.SGD())
    True
    """
    if _is_distributing(optimizer):
        return type(optimizer), len(optimizer._own.local)
    inner = inner_optimizers(optimizer) or ()
    return type(optimizer), *map(held_by_traces, inner)


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer, or each of its inner optimizers, reduces its gradients.

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
    """The `identity` of each variable whose gradients stay on their rank.

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
        for local in optimizer._own.local
        for each in local.among(variables)
    }


def shared_settings(optimizer: Any) -> dict[str, str]:
    """The settings of an optimizer that its ranks must agree on, by argument name.

    A plain optimizer has none, or those of its first distributed inner optimizer.

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> optimizer = keras_hvd.DistributedOptimizer(
    ...     keras.optimizers.SGD(), op=keras_hvd.Sum)
    >>> shared_settings(optimizer)["op"]
    'Sum'
    """
    if not _is_distributing(optimizer):
        # compile() wraps a distributed optimizer in a plain LossScaleOptimizer.
        inner = inner_optimizers(optimizer) or ()
        return next(filter(None, map(shared_settings, inner)), {})
    settings = optimizer._settings
    values = {**vars(settings.reduction), **vars(settings)}
    if isinstance(settings.reduction.groups, tuple):
        values["groups"] = tuple(map(labels_of, settings.reduction.groups))
    # Process sets train separately, and local gradients differ between ranks anyway.
    for each in ("reduction", "process_set", "scale_local_gradients"):
        del values[each]
    return {argument: shown(value) for argument, value in values.items()}


def reduces_with(optimizer: Any) -> ProcessSet:
    """The process set over which a distributed optimizer reduces its gradients.

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> reduces_with(keras_hvd.DistributedOptimizer(keras.optimizers.SGD())).ranks
    [0]
    """
    return optimizer._settings.reduction.process_set


def before_first_update(
    optimizer: keras.optimizers.Optimizer, action: Callable[[], bool]
) -> None:
    """Makes a distributed optimizer call `action` once it is built, before it updates.

    In a `tf.function`, that is while the first step is traced, before it runs. If the
    trace creates variables, TensorFlow initializes them afterwards and traces again. So
    `action`, which is called outside of that graph, returns whether it is done. If not,
    it is called again.
    """
    inner = inner_optimizers(optimizer)
    for each in inner or ():
        before_first_update(each, action)
    if not inner:
        optimizer._own.before_first_update = action


class _OfDistributed(UpdateHook):
    """Hooks into the methods of a distributed optimizer."""

    def reduction_of(self, optimizer: Any) -> GradientReduction | None:
        reduction = optimizer._settings.reduction
        return None if reduction.is_alone() else reduction

    def terms(self, optimizer, variables):
        settings = optimizer._settings
        local = local_variables([optimizer], variables)
        number = number_of(settings.reduction.process_set, "DistributedOptimizer")
        prefix = settings.name or name_in_program(optimizer, number)
        return prefix, local, settings.passes

    def factor(self, optimizer: Any) -> int:
        # Keras averages the gradients that it accumulates.
        settings = optimizer._settings
        averages = settings.average_aggregated_gradients
        return 1 if averages else settings.backward_passes_per_step

    def apply(self, plain, optimizer, grads, trainable_variables=None):
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        variables = trainable_variables or list(optimizer._trainable_variables)
        if len(grads) and variables:
            reduction = self.reduction_of(optimizer)
            if reduction is not None:
                framework.current_strategy.require_none(optimizer)
            # Also on a rank that reduces nothing, because all ranks take part in a
            # broadcast.
            _run_before_first_update(optimizer, variables)
            if reduction is not None:
                local = local_variables([optimizer], variables)
                framework.equal_start.compare(variables, reduction, local)
        with _only_alone_if_alone(optimizer):
            return super().apply(plain, optimizer, grads, trainable_variables)


_hook = _OfDistributed()


class _Own:
    """Attributes of a distributed optimizer that Keras must not track."""

    def __init__(self) -> None:
        self.local: list[LocalVariables] = []
        self.before_first_update: Callable[[], bool] | None = None


class _Distributed(Mixin):
    """An optimizer whose class was changed by `DistributedOptimizer`."""

    _plain_class: type
    _settings: Settings

    @property
    def _own(self) -> _Own:
        # An optimizer made by `type(optimizer).from_config` has none yet.
        return self.__dict__.setdefault("_keras_hvd", _Own())

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradients of a variable on their rank.

        Args:
            var: a Keras variable or a `tf.Variable`.

        Raises:
            TypeError: `var` is something else.
        """
        self._keep_local(LocalVariables.of(var))

    def _keep_local(self, local: LocalVariables) -> None:
        self._own.local.append(local)
        _note_change(self)
        for each in inner_optimizers(self) or ():
            each._keep_local(local)

    def __reduce__(self):
        # Keras pickles (and copies) a reference to the class with the saved optimizer.
        # This class has no name of its own to refer to.
        _, saved = super().__reduce__()
        paths = frozenset(each for local in self._own.local for each in local.paths())
        return _unpickle, (self._plain_class, self._settings, paths, *saved)


class _DistributesInner(_Distributed):
    """An optimizer that delegates updates to inner ones; `build` may choose them."""

    def apply(self, grads, trainable_variables=None):
        reduction = self._settings.reduction
        if not reduction.is_alone():
            framework.require_not_reduced(self, grads, reduction)
        with _only_alone_if_alone(self):
            return super().apply(grads, trainable_variables)

    def build(self, variables):
        super().build(variables)
        for each in inner_optimizers(self) or ():
            if not _is_distributing(each):
                distribute(each, self._settings, self._own.local)
        action, self._own.before_first_update = self._own.before_first_update, None
        if action is not None:
            before_first_update(self, action)


def _note_change(optimizer: Any) -> None:
    global _changes
    _changes += 1
    framework.traced_updates.note_change(optimizer)


@functools.cache
def _distributed_class(plain: type, updates: bool, settings: Settings) -> type:
    """A subclass that looks like `plain` to Keras, and when it is saved or printed.

    Keras serializes `obj.__class__`. Plain Keras cannot load a class that is neither
    exported by Keras nor registered by the user.
    """
    return type(
        plain.__name__,
        (_Distributed if updates else _DistributesInner, plain),
        {
            **(_hook.methods_before(plain) if updates else {}),
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
        f"optimizer {optimizer.name!r} is already distributed, with other "
        f"arguments: {differing}"
    )


def _reduction_of(optimizer: Any) -> GradientReduction | None:
    """The reduction in a `LossScaleOptimizer`; None if its optimizers do not reduce."""
    if not is_distributed(optimizer):
        return None
    leaf = (leaf_optimizers(optimizer) or [optimizer])[0]
    with _only_alone_if_alone(leaf):
        return _hook.reduction_of(leaf)


def _terms_of(optimizer: Any) -> tuple[Any, ...] | None:
    """What is known of an optimizer's reduction before there are gradients.

    None if it reduces nothing itself, or has still to be built.
    """
    if not _is_distributing(optimizer) or inner_optimizers(optimizer) is not None:
        return None
    reduction = _hook.reduction_of(optimizer)
    if reduction is None or not optimizer.built:
        return None
    framework.current_strategy.require_none(optimizer)
    variables = list(optimizer._trainable_variables)
    prefix, local, agreed = _hook.terms(optimizer, variables)
    return reduction, prefix, variables, local, agreed


def _only_alone_if_alone(optimizer: Any) -> contextlib.AbstractContextManager:
    reduction = optimizer._settings.reduction
    if not reduction.is_alone():
        return contextlib.nullcontext()
    return framework.reduction.only_alone(reduction)


def _run_before_first_update(optimizer: Any, variables: Sequence[Any]) -> None:
    own = optimizer._own
    if own.before_first_update is None:
        return
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
    with framework.init_scope():
        if own.before_first_update():
            own.before_first_update = None


def _is_distributing(optimizer: Any) -> bool:
    return isinstance(optimizer, _Distributed)
