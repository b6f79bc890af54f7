"""The current `keras_hvd.Strategy`."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib


class OwnExtended(distribute_lib.StrategyExtendedV1):
    """The base class that identifies strategies of `keras_hvd.Strategy`."""

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__(strategy)
        global _was_made
        _was_made = True

    def require_same_job(self) -> None:
        """Raises unless the strategy was made in this job, or in one just like it."""
        raise NotImplementedError


_was_made = False


def was_made() -> bool:
    """Whether this process has made a `keras_hvd.Strategy`.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> strategy = keras_hvd.Strategy()
    >>> was_made()
    True
    """
    return _was_made


def is_ours(strategy: Any) -> bool:
    """Whether a strategy is a `keras_hvd.Strategy`.

    Example:

    >>> is_ours(tf.distribute.get_strategy())
    False
    """
    return isinstance(getattr(strategy, "extended", None), OwnExtended)


def of_model(model: Any) -> Any:
    """The `keras_hvd.Strategy` that a Keras model trains under, or None.

    Example:

    >>> import keras
    >>> of_model(keras.Sequential())
    """
    strategy = model.distribute_strategy
    return strategy if is_ours(strategy) else None


def of_replica() -> Any:
    """The `keras_hvd.Strategy` of the current replica context, or None.

    Example:

    >>> of_replica()
    """
    context = tf.distribute.get_replica_context()
    if context is None or not is_ours(context.strategy):
        return None
    return context.strategy


def several_ranks(strategy: Any) -> Any:
    """The strategy, or None if it has only one rank.

    Raises RuntimeError if it was made in an earlier job.

    Example:

    >>> several_ranks(None)
    """
    if strategy is None:
        return None
    if is_ours(strategy):
        strategy.extended.require_same_job()
    return None if strategy.num_replicas_in_sync == 1 else strategy


def require_none(optimizer: Any) -> None:
    """Raises if a `tf.distribute` strategy would reduce the gradients as well.

    >>> import keras
    >>> require_none(keras.optimizers.SGD())
    """
    created_in = getattr(optimizer, "_distribution_strategy", None)
    for strategy in (tf.distribute.get_strategy(), created_in):
        if strategy is None or strategy is _default_strategy():
            continue
        raise RuntimeError(
            f"optimizer {optimizer.name!r} is used inside the scope of "
            f"{type(strategy).__name__}, which reduces gradients itself: a "
            "DistributedOptimizer there would reduce twice. Use one of the two."
        )


@functools.cache
def _default_strategy() -> tf.distribute.Strategy:
    with tf.Graph().as_default():
        return tf.distribute.get_strategy()
