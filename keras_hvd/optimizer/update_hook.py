"""The one place where Keras' gradients are handed over for reduction.

It is `_clip_gradients`. Every optimizer of Keras calls it exactly once per real update,
after loss scaling and gradient accumulation and before clipping.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from keras_hvd.backends.current import framework
from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.backends.labels import name_in_program
from keras_hvd.backends.reduce_op import Max
from keras_hvd.backends.variables import identity
from keras_hvd.job import arrival
from keras_hvd.job.process_sets import number_of
from keras_hvd.optimizer.gradient_accumulation import only_accumulated
from keras_hvd.optimizer.loss_scaling import counts


class UpdateHook:
    """Makes every update of an optimizer reduce all of its gradients, or raises.

    Its `replacements` wrap methods of Keras: those of one distributed optimizer, or
    those of all optimizers under a strategy. A subclass defines the reduction of
    gradients.

    Example:

    >>> class OnThisRank(UpdateHook):
    ...     def reduction_of(self, optimizer):
    ...         return GradientReduction()
    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> class SkipsClipping(keras.optimizers.SGD):
    ...     def _backend_apply_gradients(self, grads, trainable_variables):
    ...         pass
    >>> hook, optimizer = OnThisRank(), SkipsClipping()
    >>> apply = keras.optimizers.Optimizer.apply
    >>> hook.apply(apply, optimizer, [1.0], [keras.Variable(1.0)])
    Traceback (most recent call last):
    RuntimeError: ... of 1 gradients that apply() was given, 0 were reduced...
    """

    def __init__(self) -> None:
        # Both are keyed by the optimizer's id, and last only while its method runs.
        self._updates: dict[int, _Update] = {}
        self._has_to_apply: set[int] = set()

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Functions that take the plain method and its arguments, by method name."""
        return {
            "apply_gradients": self.apply_gradients,
            "apply": self.apply,
            "_backend_apply_gradients": self.note_variables,
            "_clip_gradients": self.clip_gradients,
            "_backend_reset_gradient_accumulators": self.reset_accumulators,
        }

    def methods_before(self, plain: type) -> dict[str, Callable[..., Any]]:
        """The replaced methods, for a subclass of `plain`."""
        return {
            name: _method(getattr(plain, name), replacement)
            for name, replacement in self.replacements().items()
        }

    def reduction_of(self, optimizer: Any) -> GradientReduction | None:
        """The reduction of gradients; None if there is no other rank to reduce with."""
        raise NotImplementedError

    def terms(
        self, optimizer: Any, variables: Sequence[Any]
    ) -> tuple[str, Collection[int], str]:
        """The name prefix, local variables, and a text that all ranks must agree on."""
        del variables
        reduction = self.reduction_of(optimizer)
        assert reduction is not None, "there is nothing to name"
        return _name_of(optimizer, reduction), (), ""

    def factor(self, optimizer: Any) -> int:
        """The factor by which reduced gradients are multiplied."""
        del optimizer
        return 1

    def update_of(self, optimizer: Any) -> _Update | None:
        """The running call of `apply`, if it must reduce gradients."""
        return self._updates.get(id(optimizer))

    def apply_gradients(self, plain, optimizer, grads_and_vars):
        if self.reduction_of(optimizer) is None:
            return plain(optimizer, grads_and_vars)
        self._has_to_apply.add(id(optimizer))
        try:
            result = plain(optimizer, list(grads_and_vars))
            if id(optimizer) in self._has_to_apply:
                raise _not_reduced(
                    optimizer, "apply_gradients() updated without Keras' apply()"
                )
        finally:
            self._has_to_apply.discard(id(optimizer))
        return result

    def apply(self, plain, optimizer, grads, trainable_variables=None):
        self._has_to_apply.discard(id(optimizer))
        reduction = self.reduction_of(optimizer)
        if reduction is None:
            return plain(optimizer, grads, trainable_variables)
        grads = list(grads)
        framework.require_not_reduced(optimizer, grads, reduction)
        framework.reductions.note_handed_over()
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        variables = trainable_variables or optimizer._trainable_variables
        grads = _reduce_overwriting(optimizer, grads, variables, reduction)
        # An optimizer's apply() may call itself.
        outer = self.update_of(optimizer)
        update = self._updates[id(optimizer)] = _Update(reduction, grads, variables)
        try:
            result = plain(optimizer, grads, trainable_variables)
        finally:
            del self._updates[id(optimizer)]
            if outer is not None:
                self._updates[id(optimizer)] = outer
        missing = update.waiting.total()
        if missing and not only_accumulated(optimizer):
            raise _not_reduced(
                optimizer,
                f"of {update.expected} gradients that apply() was given, "
                f"{update.expected - missing} were reduced",
            )
        return result

    def note_variables(self, plain, optimizer, grads, trainable_variables):
        update = self.update_of(optimizer)
        if update is None:
            return plain(optimizer, grads, trainable_variables)
        update.variables = list(trainable_variables)
        update.is_noted = True
        with update.step:
            return plain(optimizer, grads, trainable_variables)

    def clip_gradients(self, plain, optimizer, grads):
        grads = list(grads)
        if self.reduction_of(optimizer) is None:
            grads = framework.add_up_all(grads)
        else:
            update = self.update_of(optimizer)
            if update is None or len(update.variables) != len(grads):
                raise _not_reduced(
                    optimizer,
                    f"it clips {len(grads)} gradients, and which variables they belong "
                    "to cannot be known",
                )
            grads = self.reduce(optimizer, update, grads, update.variables)
            grads = update.step.wait_for_all(grads, counts(optimizer))
        factor = self.factor(optimizer)
        if factor != 1:
            grads = [grad * factor for grad in grads]
        return plain(optimizer, grads)

    def reset_accumulators(self, plain, optimizer):
        plain(optimizer)
        update = self.update_of(optimizer)
        if update is not None:
            accumulators = optimizer._accumulated_gradients
            update.step.delay(each for each in accumulators if each is not None)

    def reduce(
        self,
        optimizer: Any,
        update: _Update,
        grads: Sequence[Any],
        variables: Sequence[Any],
    ) -> list[Any]:
        update.note_reduced(variables)
        if framework.reduction.has_reduced(optimizer):
            return list(grads)
        prefix, local, agreed = self.terms(optimizer, variables)
        return framework.reduction.reduce(
            update.reduction, prefix, grads, variables, local, agreed
        )


class _Update:
    """One call of `apply`, with the gradients that it still has to reduce."""

    def __init__(
        self,
        reduction: GradientReduction,
        grads: Sequence[Any],
        variables: Sequence[Any],
    ):
        self.reduction = reduction
        # The variables of the gradients that Keras is about to clip.
        self.variables = [
            variable
            for grad, variable in zip(grads, variables)
            if grad is not None and not _is_overwritten(variable)
        ]
        self.expected = len(self.variables)
        self.waiting = collections.Counter(map(identity, self.variables))
        # Whether Keras has named the variables of gradients that are still to come.
        self.is_noted = False
        self.step = framework.WholeStep()

    def waits_for(self, variable: Any) -> bool:
        return self.is_noted or self.waiting[identity(variable)] > 0

    def note_reduced(self, variables: Sequence[Any]) -> None:
        self.waiting -= collections.Counter(map(identity, variables))
        self.is_noted = False


def _method(plain: Callable[..., Any], replacement: Callable[..., Any]) -> Callable:
    def method(self, *args, **kwargs):
        return replacement(plain, self, *args, **kwargs)

    functools.update_wrapper(method, plain, updated=())
    # With it, AutoGraph would treat this as user code and convert its calls.
    del vars(method)["__wrapped__"]
    return method


def _name_of(optimizer: Any, reduction: GradientReduction) -> str:
    return name_in_program(optimizer, number_of(reduction.process_set, "apply"))


def _is_overwritten(variable: Any) -> bool:
    """Whether Keras assigns the gradient to the variable (scales of float8 layers)."""
    return getattr(variable, "overwrite_with_gradient", False)


@arrival.within_step()
def _reduce_overwriting(
    optimizer: Any,
    grads: Sequence[Any],
    variables: Sequence[Any],
    reduction: GradientReduction,
) -> list[Any]:
    """Reduces by Max the gradients that Keras assigns to variables before clipping."""
    results = list(grads)
    chosen = [
        i
        for i, (grad, variable) in enumerate(zip(grads, variables))
        if grad is not None and _is_overwritten(variable)
    ]
    if chosen:
        prefix = _name_of(optimizer, reduction)
        maxima = framework.grouped_allreduce(
            [grads[i] for i in chosen],
            op=Max,
            name=framework.name_in_graph(f"{prefix}/overwriting"),
            process_set=reduction.process_set,
        )
        for i, result in zip(chosen, maxima, strict=True):
            results[i] = result
    return results


def _not_reduced(optimizer: Any, why: str) -> RuntimeError:
    kind = type(optimizer)
    return RuntimeError(
        f"{kind.__module__}.{kind.__qualname__} {optimizer.name!r} would update with "
        f"gradients that are not summed over the ranks: {why}. The ranks' weights "
        "would drift apart. An optimizer has to update in update_step(), or to pass "
        "all gradients to super().apply(); where it leaves updates to another one, "
        "distribute that one instead."
    )
