"""Accumulation of several passes' gradients for one update, done by Keras itself."""

from __future__ import annotations

from typing import Any

import keras

from keras_hvd.backends.current import framework


def accumulate(optimizer: Any, passes: int) -> None:
    """Makes Keras accumulate the gradients of several passes; 1 changes nothing.

    Raises ValueError if the optimizer already accumulates a different number.

    Example:

    >>> optimizer = keras.optimizers.SGD()
    >>> accumulate(optimizer, 3)
    >>> optimizer.gradient_accumulation_steps
    3
    """
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
    if framework.executing_eagerly():
        # The count of updates becomes a count of passes. While a step is traced, the
        # optimizer is new, and this assignment would run again in every step.
        optimizer._iterations.assign(optimizer._iterations * passes)
    if optimizer.built:
        _add_accumulators(optimizer)


def only_accumulated(optimizer: Any) -> bool:
    """Whether the `apply` that just ended accumulated gradients without an update.

    This is known in eager mode only: a graph contains both cases.

    >>> optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    >>> weight = keras.Variable(1.0)
    >>> for _ in range(2):
    ...     _ = optimizer.apply([keras.ops.ones(())], [weight])
    ...     only_accumulated(optimizer)
    True
    False
    """
    steps = optimizer.gradient_accumulation_steps
    return bool(
        steps
        and framework.executing_eagerly()
        and int(optimizer._iterations) % steps != 0
    )


def _add_accumulators(optimizer: Any) -> None:
    """Adds accumulators where `build` would: files number an optimizer's variables."""
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
