"""Losses under a strategy: each rank gets its share of the whole batch's loss.

Keras divides a rank's loss by the number of ranks, as if all ranks had equally many
rows. Here it is weighted by the rank's part of the divisor of the whole batch's loss.
So the ranks' shares, and their gradients, add up to those of one process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as loss_module

from keras_hvd.backends.reduce_op import Sum
from keras_hvd.backends.tensorflow import current_strategy
from keras_hvd.backends.tensorflow.collectives.allreduce import allreduce
from keras_hvd.backends.tensorflow.collectives.graph_names import name_in_graph
from keras_hvd.backends.tensorflow.collectives.submission import on_cpu
from keras_hvd.job import log
from keras_hvd.job.temporary import temporarily
from keras_hvd.strategy import keras_patches, no_rows

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")

# Set on a loss: the loss over all ranks.
_OVER_RANKS = "_keras_hvd_over_ranks"

_here = threading.local()


class _Batch:
    """The batch of the present loss: this rank's rows, and all ranks'."""

    def __init__(self, strategy: Any, data: Any):
        self._strategy = strategy
        leaf = next(each for each in keras.tree.flatten(data) if each is not None)
        self.is_static = leaf.shape[0] is not None
        self._has_rows = no_rows.has_rows()
        # On the CPU, the host knows it before the batch is computed.
        with on_cpu():
            self._rows = self._own(tf.cast(tf.shape(leaf)[0], tf.float64))
            self._rows_of_all = self.sum(self._rows, "rows")
        # This rank's part of the divisor of a mean over all ranks.
        self.share = tf.math.divide_no_nan(self._rows, self._rows_of_all)

    def sum(self, value: tf.Tensor, what: str) -> tf.Tensor:
        """The sum of a value over the ranks, without a gradient."""
        return allreduce(
            tf.stop_gradient(value),
            op=Sum,
            name=name_in_graph(f"Strategy/loss/{what}"),
            process_set=self._strategy.extended.process_set,
        )

    def _own(self, value: tf.Tensor) -> tf.Tensor:
        return no_rows.zero_unless(self._has_rows, value)

    def divided_by(
        self, divisor: tf.Tensor | None
    ) -> contextlib.AbstractContextManager[None]:
        """Divides means by the sum of the ranks' divisors in this block."""
        if divisor is None:
            return contextlib.nullcontext()
        divisor = self._own(tf.cast(divisor, tf.float64))
        share = tf.math.divide_no_nan(divisor, self.sum(divisor, "divisor"))
        return temporarily(self, "share", share)

    def over_ranks(self, loss: tf.Tensor) -> tf.Tensor:
        """The whole batch's loss, with the gradient of this rank's loss."""
        if loss.shape.rank != 0:
            # A loss that is not reduced has a value for each row.
            loss = self._own(loss)
            total = self.sum(tf.reduce_sum(loss), "values")
            count = self.sum(self._own(tf.cast(tf.size(loss), loss.dtype)), "count")
            over_ranks = tf.math.divide_no_nan(total, count)
        else:
            loss = tf.where(self._rows > 0, loss, tf.zeros_like(loss))
            loss = over_ranks = _with_value(loss, self.sum(loss, "value"))
        setattr(loss, _OVER_RANKS, over_ranks)
        return loss

    def of_output(self, share: tf.Tensor) -> tf.Tensor:
        """The value for the tracker of one output's loss, from this rank's share.

        Keras weights it by the number of rows if the trace knows it, else by one.
        """
        share = self._own(share)
        if not self.is_static:
            return share * self._strategy.num_replicas_in_sync
        return share * tf.cast(
            tf.math.divide_no_nan(self._rows_of_all, self._rows), share.dtype
        )


@keras_patches.replaces(keras.Model, "_compute_loss", "compute_loss")
def _compute_loss(plain, model, x=None, y=None, y_pred=None, *others, **named):
    compute = functools.partial(plain, model, x, y, y_pred, *others, **named)
    strategy = current_strategy.several_ranks(current_strategy.of_replica())
    if strategy is None or _batch() is not None:
        return compute()
    batch = _Batch(strategy, [x, y_pred, y])

    def counted() -> list[Any]:
        """Variables of the outputs' losses, of which each rank counts its share."""
        metrics = [] if batch.is_static else model._compile_loss.metrics
        return [each for metric in metrics for each in metric.variables]

    with temporarily(_here, "batch", batch), no_rows.counting(counted):
        loss = compute()
    return batch.over_ranks(loss)


def _batch() -> _Batch | None:
    return getattr(_here, "batch", None)


@keras_patches.replaces(loss_module, "reduce_weighted_values")
def _reduce_weighted_values(
    plain, values, sample_weight=None, mask=None, reduction=_MEANS[0], dtype=None
):
    compute = functools.partial(plain, values, sample_weight, mask, reduction, dtype)
    batch = _batch()
    if batch is None or reduction not in (*_MEANS, "sum"):
        return compute()
    if reduction == "sum":
        loss = compute()
    else:
        if tf.convert_to_tensor(values).shape.rank == 0:
            _warn_of_scalar()
        with batch.divided_by(_divisor(sample_weight, mask, reduction, dtype)):
            loss = compute()
    # Keras leaves a loss without rows as it is.
    return tf.reduce_sum(loss) if loss.shape == (0,) else loss


def _divisor(weights: Any, mask: Any, reduction: str, dtype: Any) -> Any:
    """Keras' divisor of a sum, if it is not proportional to the number of rows."""
    if reduction != "mean_with_sample_weight":
        return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float64))
    given = (
        None if each is None else keras.ops.convert_to_tensor(each, dtype=dtype)
        for each in (weights, mask)
    )
    weights = loss_module.apply_mask(*given, "float64", reduction)
    return None if weights is None else tf.reduce_sum(tf.cast(weights, tf.float64))


@keras_patches.replaces(loss_module, "scale_loss_for_distribution")
def _scale(plain, value):
    batch = _batch()
    if batch is not None:
        return value * tf.cast(batch.share, value.dtype)
    strategy = tf.distribute.get_strategy()
    if not current_strategy.is_ours(strategy):
        return plain(value)
    # Keras' own function would round a rank's share to float32.
    return value / strategy.num_replicas_in_sync


@keras_patches.replaces(loss_module, "unscale_loss_for_distribution")
def _unscale(plain, value):
    over_ranks = getattr(value, _OVER_RANKS, None)
    if over_ranks is not None:
        return over_ranks
    batch = _batch()
    return plain(value) if batch is None else batch.of_output(value)


@functools.cache
def _warn_of_scalar() -> None:
    log.warn(
        "a loss function returned one number for the batch. Under a keras_hvd.Strategy "
        "the ranks' numbers are added up, which gives several times the mean: return a "
        "value for each sample (axis= makes Dice and Tversky do so), or divide by "
        "strategy.num_replicas_in_sync",
        stacklevel=2,
    )


def _with_value(tensor: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The value, with the gradient of the tensor."""

    @tf.custom_gradient
    def exchange(tensor, value):
        return tf.identity(value), lambda gradient: (gradient, None)

    return exchange(tensor, value)
