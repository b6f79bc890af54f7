"""The replica context of code that a strategy runs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class ReplicaContext(tf.distribute.ReplicaContext):
    """The context in which `Strategy.run` runs a function on this rank.

    Args:
        strategy: the `keras_hvd.Strategy`.
        replica_id: this rank's place among the strategy's ranks.

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
        """This rank's only device, as a tuple."""
        return self.strategy.extended.worker_devices

    @tf.autograph.experimental.do_not_convert
    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduces a structure of tensors over the ranks, as one group.

        Differentiable: the gradient is reduced in the same way.

        Args:
            reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`, or its name.
            value: a tensor, `tf.IndexedSlices`, or a nested structure of them.
            options: ignored; accepted for existing scripts.

        Returns:
            The results, in the structure of `value`.
        """
        del options
        return self.strategy.extended.reduce_nested(reduce_op, value)

    @tf.autograph.experimental.do_not_convert
    def all_gather(self, value: Any, axis: Any, options: Any = None) -> Any:
        """Concatenates the ranks' tensors along a dimension.

        Differentiable: each rank gets its part of the sum of all ranks' gradients.

        Args:
            value: a tensor with at least one dimension, or a nested structure of them.
            axis: the dimension. Its size may differ between ranks.
            options: ignored; accepted for existing scripts.

        Returns:
            The results, in the structure of `value`.
        """
        del options
        return self.strategy.extended.gather_nested(value, axis)
