"""Learning rates as Keras schedules."""

from __future__ import annotations

import keras

from keras_hvd.runtime import basics


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
    first = (1 + (basics.size() - 1) / warmup_steps) / basics.size()
    return keras.optimizers.schedules.PolynomialDecay(
        initial_learning_rate=learning_rate * first,
        decay_steps=max(1, warmup_steps - 1),
        end_learning_rate=learning_rate,
        power=1.0,
        name=name,
    )
