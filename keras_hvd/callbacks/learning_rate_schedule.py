"""LearningRateSchedule: the learning rate as a multiple of an initial one, by epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_hvd.callbacks.coordination import DistributedCallback
from keras_hvd.optimizer.nested_optimizers import inner_optimizers


class LearningRateSchedule(DistributedCallback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)`.

    Several of them, each for a range of epochs, make up a schedule. With
    `steps_per_execution` above 1 the rate changes between executions.

    Args:
        initial_lr: the learning rate that multipliers refer to.
        multiplier: a number, or a function from the epoch (a fraction, unless
            `staircase`) to a number.
        start_epoch: the first epoch of this callback.
        end_epoch: the first epoch after this callback; None: no end.
        staircase: whether the rate changes only at the beginning of epochs. Always so
            if `multiplier` is a number.
        momentum_correction: whether to scale the momentum of SGD and RMSprop, which
            holds past updates and so past learning rates, when the rate changes.
        steps_per_epoch: number of batches in an epoch; needed if Keras does not know
            it, unless `staircase`.

    Raises:
        TypeError: the optimizer's learning rate is a schedule or a function, which
            cannot be set (when training begins).
        ValueError: `initial_lr` is not a number, or `multiplier` is neither a number
            nor a function; or, when training begins, the optimizer is a
            `MultiOptimizer`, which has no learning rate of its own, or
            `steps_per_epoch` is missing.

    Example:

    >>> import keras, keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.4))
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(optimizer, "mse")
    >>> decay = keras_hvd.callbacks.LearningRateSchedule(0.4, lambda epoch: 0.5**epoch)
    >>> history = model.fit(np.ones((4, 1)), np.zeros(4), epochs=3, verbose=0,
    ...     callbacks=[decay])
    >>> [round(rate, 3) for rate in history.history["learning_rate"]]
    [0.4, 0.2, 0.1]
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        kind = type(self).__name__
        self.initial_lr = _number(f"{kind}: initial_lr must be a number", initial_lr)
        if not callable(multiplier):
            wanted = f"{kind}: multiplier must be a number or a function"
            multiplier = _number(wanted, multiplier)
        self.multiplier = multiplier if callable(multiplier) else lambda _: multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._steps: Any = steps_per_epoch  # None only with a staircase

    def on_train_begin(self, logs=None):
        self._steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if not self.staircase and not self._steps:
            raise ValueError(
                f"{type(self).__name__} needs steps_per_epoch: Keras does not know how "
                "many batches this data has"
            )
        _require_settable(self.model.optimizer, type(self).__name__)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        if self.staircase and self._is_in_range():
            self._set_learning_rate(epoch)

    def on_train_batch_begin(self, batch, logs=None):
        if not self.staircase and self._is_in_range():
            self._set_learning_rate(self._epoch + batch / self._steps)

    def on_epoch_end(self, epoch, logs=None):
        # A callback before this one may have logged the epoch's rate, and changed it.
        if logs is not None:
            rate = float(self.model.optimizer.learning_rate)
            logs.setdefault("learning_rate", rate)

    def _is_in_range(self):
        ended = self.end_epoch is not None and self._epoch >= self.end_epoch
        return self._epoch >= self.start_epoch and not ended

    def _set_learning_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)
        after = float(optimizer.learning_rate)
        if self.momentum_correction and before not in (0.0, after):
            _scale_momentum(optimizer, after / before)


def _number(wanted: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{wanted}; got {value!r}") from None


def _scale_momentum(optimizer: keras.optimizers.Optimizer, factor: float) -> None:
    """Scales past updates as if they had been made at the new learning rate.

    Keras' other optimizers keep averages of gradients, without the learning rate. The
    slots are scaled because `momentum` itself is a constant in compiled steps.
    """
    inner = inner_optimizers(optimizer)
    for leaf in [optimizer] if inner is None else inner:
        if not leaf.built:
            continue
        if isinstance(leaf, keras.optimizers.SGD):
            slots = leaf.momentums
        elif isinstance(leaf, keras.optimizers.RMSprop):
            slots = leaf._momentums
        else:
            slots = []
        for slot in slots:
            if slot is not None:
                slot.assign(slot * factor)


def _require_settable(optimizer: Any, callback: str) -> None:
    inner = inner_optimizers(optimizer)
    if inner is not None and not isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer
    ):
        raise ValueError(
            f"{callback} cannot set the learning rate of {type(optimizer).__name__} "
            f"{optimizer.name!r}: each of its inner optimizers has its own. Give them "
            "keras.optimizers.schedules instead (keras_hvd.warmup_schedule is one)."
        )
    leaf = inner[0] if inner else optimizer
    if isinstance(leaf._learning_rate, keras.Variable):
        return
    raise TypeError(
        f"{callback} cannot set the learning rate of optimizer {leaf.name!r}: it is "
        f"computed by {leaf._learning_rate!r}. Create the optimizer with a number as "
        "its learning rate, or remove this callback (keras_hvd.warmup_schedule is a "
        "warmup that is a schedule)."
    )
