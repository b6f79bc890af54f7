"""Which `keras_hvd.Strategy` code runs under."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib


class OwnExtended(distribute_lib.StrategyExtendedV1):
    """What tells the strategies of `keras_hvd.Strategy` from all others."""


def is_ours(strategy: Any) -> bool:
    """Whether a strategy is a `keras_hvd.Strategy`.

    Args:
        strategy: any `tf.distribute` strategy, or None.

    Returns:
        True if it is.

    Example:

    >>> is_ours(tf.distribute.get_strategy())
    False
    """
    return isinstance(getattr(strategy, "extended", None), OwnExtended)


def of_model(model: Any) -> Any:
    """The strategy that a model trains under.

    Args:
        model: a Keras model.

    Returns:
        A `keras_hvd.Strategy`, or None.

    Example:

    >>> import keras
    >>> of_model(keras.Sequential())
    """
    strategy = model.distribute_strategy
    return strategy if is_ours(strategy) else None


def of_replica() -> Any:
    """The strategy in whose replica context code runs.

    Returns:
        A `keras_hvd.Strategy`, or None.

    Example:

    >>> of_replica()
    """
    context = tf.distribute.get_replica_context()
    if context is None or not is_ours(context.strategy):
        return None
    return context.strategy


def several_ranks(strategy: Any) -> Any:
    """The strategy, if it has anything to do.

    Args:
        strategy: a `keras_hvd.Strategy`, or None.

    Returns:
        It, or None where it has one rank only.

    Example:

    >>> several_ranks(None)
    """
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return None
    return strategy
