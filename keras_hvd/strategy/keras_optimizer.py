"""Keras optimizers under a strategy: gradients are summed before they are clipped.

Keras would sum them after clipping, one collective for all. Here they travel as those
of a `DistributedOptimizer` do: in buckets, as backprop produces them.
"""

from __future__ import annotations

from typing import Any

import keras

from keras_hvd import current_strategy
from keras_hvd.collectives.allreduce_op import Sum
from keras_hvd.optimizer.gradient_reduction import GradientReduction
from keras_hvd.optimizer.loss_scaling import agree_on_finite_gradients
from keras_hvd.optimizer.nested_optimizers import inner_optimizers
from keras_hvd.optimizer.repeated_rows import add_up_all
from keras_hvd.optimizer.update_hook import UpdateHook
from keras_hvd.strategy import keras_patches, variables


def install() -> None:
    """Has Keras' optimizers reduce as a `keras_hvd.Strategy` wants it."""
    for name, replacement in _OfStrategy().replacements().items():
        keras_patches.replace(keras.optimizers.Optimizer, name, replacement)
    agree_on_finite_gradients(_reduction_of_replica)


def require_made_under(strategy: Any, optimizer: Any) -> None:
    """Raises unless an optimizer, or None, was made in the scope of a strategy.

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


class _OfStrategy(UpdateHook):
    """What goes before the methods of all optimizers.

    Methods that a user's class overrides come before these. So it is not known here
    whether gradients that are clipped have been through here before.
    """

    def replacements(self):
        late = {"_all_reduce_sum_gradients": self.all_reduce_sum_gradients}
        return super().replacements() | late

    def reduction_of(self, optimizer: Any) -> GradientReduction | None:
        # One that leaves the updates to others leaves the reduction to them too.
        if inner_optimizers(optimizer) is not None:
            return None
        return _reduction_of_replica(optimizer)

    def apply(self, plain, optimizer, grads, trainable_variables=None):
        strategy = current_strategy.of_replica()
        if strategy is None:
            return plain(optimizer, grads, trainable_variables)
        require_made_under(strategy, optimizer)
        # Gradients are sums by the time that variables are assigned, and so are equal.
        with variables.equal_values():
            return super().apply(plain, optimizer, grads, trainable_variables)

    def clip_gradients(self, plain, optimizer, grads):
        update = self.update_of(optimizer)
        if update is None:
            in_replica = current_strategy.of_replica() is not None
            return plain(optimizer, add_up_all(list(grads)) if in_replica else grads)
        if not update.is_noted or len(update.variables) != len(grads):
            return plain(optimizer, grads)
        return super().clip_gradients(plain, optimizer, grads)

    def all_reduce_sum_gradients(self, plain, optimizer, grads_and_vars):
        """Sums what did not pass clipping, or came there without its variables."""
        update = self.update_of(optimizer)
        if update is None:
            return plain(optimizer, grads_and_vars)
        pairs = list(grads_and_vars)
        late = [
            i
            for i, (grad, variable) in enumerate(pairs)
            if grad is not None and update.waits_for(variable)
        ]
        if late:
            grads, of_variables = zip(*(pairs[i] for i in late))
            sums = self.reduce(optimizer, update, grads, of_variables)
            for i, reduced in zip(late, sums, strict=True):
                pairs[i] = reduced, pairs[i][1]
        return pairs


def _reduction_of_replica(optimizer: Any) -> GradientReduction | None:
    del optimizer
    strategy = current_strategy.several_ranks(current_strategy.of_replica())
    if strategy is None:
        return None
    return GradientReduction(op=Sum, process_set=strategy.extended.process_set)
