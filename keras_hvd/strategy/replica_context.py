"""What code that a strategy runs knows of its replica."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class ReplicaContext(tf.distribute.ReplicaContext):
    """The context in which `Strategy.run` runs a function on this rank.

    Args:
        strategy: the `keras_hvd.Strategy`.
        replica_id: this rank's place among those of the strategy.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> def step():
    ...     context = tf.distribute.get_replica_context()
    ...     return context.all_reduce("SUM", context.replica_id_in_sync_group + 1)
    >>> keras_hvd.Strategy().run(step).numpy().item()
    1
    """

    def __init__(self, strategy: tf.distribute.Strategy, replica_id: int) -> None:
        super().__init__(strategy, replica_id_in_sync_group=replica_id)

    @property
    def devices(self) -> tuple[str, ...]:
        """The one device of this rank, as a tuple."""
        return self.strategy.extended.worker_devices

    @tf.autograph.experimental.do_not_convert
    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduces a structure of tensors over the ranks, all of them together.

        Differentiable: the gradient is reduced in the same way.

        Args:
            reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`, or its name.
            value: a tensor, `tf.IndexedSlices`, or a nested structure of them.
            options: accepted for scripts that give it; it changes nothing.

        Returns:
            The results, in the structure of `value`.
        """
        del options
        return self.strategy.extended.reduce_nested(reduce_op, value)

    @tf.autograph.experimental.do_not_convert
    def all_gather(self, value: Any, axis: Any, options: Any = None) -> Any:
        """Joins the ranks' tensors along a dimension.

        Differentiable: each rank gets its part of the sum of all ranks' gradients.

        Args:
            value: a tensor of at least one dimension, or a nested structure of them.
            axis: the dimension, in which the ranks' tensors may differ.
            options: accepted for scripts that give it; it changes nothing.

        Returns:
            The results, in the structure of `value`.
        """
        del options
        return self.strategy.extended.gather_nested(value, axis)
