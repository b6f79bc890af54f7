"""Keras optimizers under a strategy: gradients are summed before they are clipped.

Keras would sum them after clipping, one collective for all. Here they travel as those
of a `DistributedOptimizer` do: in buckets, as backprop produces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_hvd import current_strategy
from keras_hvd.collectives.allreduce import allreduce
from keras_hvd.collectives.allreduce_op import Min, Sum
from keras_hvd.collectives.submission import on_cpu
from keras_hvd.optimizer.distributed_class import is_overwritten, reduce_overwriting
from keras_hvd.optimizer.gradient_accumulation import only_accumulated
from keras_hvd.optimizer.gradient_reduction import (
    GradientReduction,
    name_in_graph,
    require_not_reduced,
)
from keras_hvd.optimizer.nested_optimizers import inner_optimizers
from keras_hvd.optimizer.repeated_rows import add_up_all
from keras_hvd.strategy import keras_hooks, variables

# Attributes of an optimizer, past Keras' tracking: the update that is under way, and
# how many there were.
_UPDATE = "_keras_hvd_update"
_UPDATES = "_keras_hvd_updates"


def install() -> None:
    """Has Keras' optimizers reduce as a `keras_hvd.Strategy` wants it."""
    optimizer = keras.optimizers.Optimizer
    for name, replacement in {
        "apply_gradients": _apply_gradients,
        "apply": _apply,
        "_overwrite_variables_directly_with_gradients": _overwrite,
        "_backend_apply_gradients": _backend_apply_gradients,
        "_clip_gradients": _clip_gradients,
        "_all_reduce_sum_gradients": _all_reduce_sum_gradients,
    }.items():
        keras_hooks.replace(optimizer, name, replacement)
    scaling = keras.optimizers.LossScaleOptimizer
    keras_hooks.replace(scaling, "check_finite", _check_finite)


def require_made_under(strategy: Any, optimizer: Any) -> None:
    """Raises unless an optimizer was made in the scope of a strategy.

    Args:
        strategy: a `keras_hvd.Strategy`.
        optimizer: a Keras optimizer, or None.

    Raises:
        RuntimeError: it was made elsewhere.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> require_made_under(keras_hvd.Strategy(), keras.optimizers.SGD())
    Traceback (most recent call last):
    RuntimeError: SGD 'sgd' was made outside of the scope of the keras_hvd.Strategy ...
    """
    for each in (optimizer, *(inner_optimizers(optimizer) or ())):
        if getattr(each, "_distribution_strategy", strategy) is strategy:
            continue
        raise RuntimeError(
            f"{type(each).__name__} {each.name!r} was made outside of the scope of the "
            "keras_hvd.Strategy that it is used under: make it, and the model, inside "
            "of `with strategy.scope():`"
        )


class _Update:
    """One call of `apply`: what it has to reduce, and whether that was done."""

    def __init__(self, strategy: Any):
        self._process_set = strategy.extended.process_set
        self.variables: list[Any] = []
        self.reduced = False

    def reduce(
        self, optimizer: Any, grads: Sequence[Any], of_variables: Sequence[Any]
    ) -> list[Any]:
        """The sums over the ranks.

        Args:
            optimizer: whose update it is.
            grads: this rank's gradients.
            of_variables: what they are the gradients of.

        Returns:
            A list as long.
        """
        self.reduced = True
        reduction = GradientReduction(op=Sum, process_set=self._process_set)
        return reduction.reduce(optimizer.name, list(grads), list(of_variables))

    def reduce_overwriting(
        self, optimizer: Any, grads: Sequence[Any], of_variables: Sequence[Any]
    ) -> list[Any]:
        """The maxima of what Keras assigns to variables, and the others' gradients."""
        return reduce_overwriting(
            optimizer.name, list(grads), of_variables, self._process_set
        )


def _apply_gradients(plain, optimizer, grads_and_vars):
    strategy = current_strategy.several_ranks(current_strategy.of_replica())
    if strategy is None or inner_optimizers(optimizer) is not None:
        return plain(optimizer, grads_and_vars)
    state = vars(optimizer)
    before = state.get(_UPDATES, 0)
    result = plain(optimizer, list(grads_and_vars))
    if state.get(_UPDATES, 0) == before:
        raise _not_reduced(optimizer, "its apply() does not call super().apply()")
    return result


def _apply(plain, optimizer, grads, trainable_variables=None):
    strategy = current_strategy.of_replica()
    if strategy is None:
        return plain(optimizer, grads, trainable_variables)
    require_made_under(strategy, optimizer)
    # Gradients are sums by the time that variables are assigned, and so are equal.
    with variables.equal_values():
        if current_strategy.several_ranks(strategy) is None:
            return plain(optimizer, grads, trainable_variables)
        return _apply_sums(plain, optimizer, strategy, grads, trainable_variables)


def _apply_sums(plain, optimizer, strategy, grads, trainable_variables):
    require_not_reduced(optimizer, grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    of_variables = trainable_variables or optimizer._trainable_variables
    to_reduce = any(
        grad is not None and not is_overwritten(variable)
        for grad, variable in zip(grads, of_variables)
    )
    update = _Update(strategy)
    state = vars(optimizer)
    state[_UPDATE] = update
    state[_UPDATES] = state.get(_UPDATES, 0) + 1
    try:
        result = plain(optimizer, grads, trainable_variables)
    finally:
        del state[_UPDATE]
    if to_reduce and not update.reduced and not only_accumulated(optimizer):
        raise _not_reduced(optimizer, "it updates variables in a way of its own")
    return result


def _overwrite(plain, optimizer, grads, of_variables):
    update = vars(optimizer).get(_UPDATE)
    if update is not None:
        grads = update.reduce_overwriting(optimizer, grads, of_variables)
    return plain(optimizer, grads, of_variables)


def _backend_apply_gradients(plain, optimizer, grads, trainable_variables):
    update = vars(optimizer).get(_UPDATE)
    if update is not None:
        update.variables = list(trainable_variables)
    return plain(optimizer, grads, trainable_variables)


def _clip_gradients(plain, optimizer, grads):
    update = vars(optimizer).get(_UPDATE)
    # Where it is not known what they belong to, _all_reduce_sum_gradients knows.
    if update and not update.reduced and len(update.variables) == len(grads):
        grads = update.reduce(optimizer, grads, update.variables)
    elif update is None and current_strategy.of_replica() is not None:
        grads = add_up_all(list(grads))
    return plain(optimizer, grads)


def _all_reduce_sum_gradients(plain, optimizer, grads_and_vars):
    update = vars(optimizer).get(_UPDATE)
    if update is None:
        return plain(optimizer, grads_and_vars)
    pairs = list(grads_and_vars)
    if update.reduced:
        return pairs
    present = [i for i, (grad, _) in enumerate(pairs) if grad is not None]
    sums = update.reduce(
        optimizer, [pairs[i][0] for i in present], [pairs[i][1] for i in present]
    )
    for i, reduced in zip(present, sums, strict=True):
        pairs[i] = reduced, pairs[i][1]
    return pairs


def _check_finite(plain, optimizer, grads):
    finite = plain(optimizer, grads)
    strategy = current_strategy.several_ranks(current_strategy.of_replica())
    if strategy is None:
        return finite
    name = name_in_graph(f"{optimizer.name}/{optimizer.inner_optimizer.name}/finite")
    process_set = strategy.extended.process_set
    # The host decides by it.
    with on_cpu():
        return allreduce(finite, op=Min, name=name, process_set=process_set)


def _not_reduced(optimizer: Any, why: str) -> RuntimeError:
    kind = type(optimizer)
    return RuntimeError(
        f"{kind.__module__}.{kind.__qualname__} {optimizer.name!r} would update "
        f"without gradients being summed over the ranks: {why}. Under a "
        "keras_hvd.Strategy an optimizer updates in update_step(), or passes all "
        "gradients to super().apply()."
    )
