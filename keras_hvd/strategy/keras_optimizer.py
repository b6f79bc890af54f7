"""Keras optimizers under a strategy: gradients are summed before they are clipped.

Keras would sum them after clipping, all in one collective. Here they are sent like
those of a `DistributedOptimizer`: in buckets, as backprop produces them.
"""

from __future__ import annotations

from typing import Any

import keras

from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.backends.reduce_op import Sum
from keras_hvd.backends.tensorflow import current_strategy
from keras_hvd.backends.tensorflow.gradients.repeated_rows import add_up_all
from keras_hvd.optimizer.loss_scaling import agree_on_finite_gradients
from keras_hvd.optimizer.nested_optimizers import inner_optimizers
from keras_hvd.optimizer.update_hook import UpdateHook
from keras_hvd.strategy import keras_patches, no_rows, variables


def install() -> None:
    """Makes Keras' optimizers reduce gradients for a `keras_hvd.Strategy`."""
    for name, replacement in _OfStrategy().replacements().items():
        keras_patches.replace(keras.optimizers.Optimizer, name, replacement)
    agree_on_finite_gradients(_reduction_of_replica)


def require_made_under(strategy: Any, optimizer: Any) -> None:
    """Raises RuntimeError unless an optimizer, or None, was made in the scope.

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
    """Hooks into the methods of all optimizers.

    Overrides in a user's class run before these methods. So this class cannot know
    whether it has already seen the gradients that are clipped.
    """

    def replacements(self):
        late = {"_all_reduce_sum_gradients": self.all_reduce_sum_gradients}
        return super().replacements() | late

    def reduction_of(self, optimizer: Any) -> GradientReduction | None:
        # An optimizer that delegates its updates delegates the reduction too.
        if inner_optimizers(optimizer) is not None:
            return None
        return _reduction_of_replica(optimizer)

    def apply(self, plain, optimizer, grads, trainable_variables=None):
        strategy = current_strategy.of_replica()
        if strategy is None:
            return plain(optimizer, grads, trainable_variables)
        require_made_under(strategy, optimizer)
        grads = [no_rows.own_gradient(grad) for grad in grads]
        # Gradients are summed before variables are assigned, so the values are equal.
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
        """Sums gradients that skipped clipping or got there without their variables."""
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
    strategy = current_strategy.several_ranks(current_strategy.of_replica())
    if strategy is None:
        return None
    return GradientReduction(op=Sum, process_set=strategy.extended.process_set)
