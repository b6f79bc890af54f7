"""Learning rates as Keras schedules."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

from keras_hvd.backends.current import framework
from keras_hvd.job import basics


class _Begin(NamedTuple):
    """The arguments from which the first learning rate is computed."""

    learning_rate: float
    warmup_steps: int
    size: int  # outside of a job


class _Warmup(keras.optimizers.schedules.PolynomialDecay):
    """A `PolynomialDecay` to Keras. Its first rate is for the present job."""

    _begin: _Begin

    @property  # type: ignore[misc]  # Keras would find, and save, the class below
    def __class__(self):
        return keras.optimizers.schedules.PolynomialDecay

    @property
    def initial_learning_rate(self) -> Any:
        """A number, or a tensor in a graph, which reads the number of ranks."""
        begin = self._begin
        size = framework.size_of() if basics.is_initialized() else begin.size
        is_number = isinstance(size, int)
        size = size if is_number else keras.ops.cast(size, "float64")
        first = (1 + (size - 1) / begin.warmup_steps) / size * begin.learning_rate
        return first if is_number else keras.ops.cast(first, keras.config.floatx())

    @initial_learning_rate.setter
    def initial_learning_rate(self, begin: _Begin) -> None:
        self._begin = begin

    def __reduce__(self):
        return _warmup, (self._begin, self.name)


def _warmup(begin: _Begin, name: str) -> _Warmup:
    return _Warmup(
        initial_learning_rate=begin,
        decay_steps=max(1, begin.warmup_steps - 1),
        end_learning_rate=begin.learning_rate,
        power=1.0,
        name=name,
    )


def warmup_schedule(
    learning_rate: float, warmup_steps: int, name: str = "warmup"
) -> keras.optimizers.schedules.LearningRateSchedule:
    """The learning rates of `LearningRateWarmup` as a Keras schedule.

    It is Keras' own `PolynomialDecay`, upwards, so a saved model loads without
    keras_hvd.

    Args:
        learning_rate: the rate after the warmup, usually one process' times `size()`.
        warmup_steps: number of steps of the warmup.
        name: the schedule's name.

    Returns:
        A schedule that rises from `learning_rate / size()` to `learning_rate` and
        stays.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        ValueError: `warmup_steps` is less than 1.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> schedule = keras_hvd.warmup_schedule(0.1 * keras_hvd.size(), warmup_steps=100)
    >>> optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(schedule))
    """
    basics.require_initialized("warmup_schedule")
    if warmup_steps < 1:
        raise ValueError(f"warmup_steps must be at least 1, got {warmup_steps!r}")
    return _warmup(_Begin(learning_rate, warmup_steps, basics.size()), name)
