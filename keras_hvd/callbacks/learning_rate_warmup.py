"""LearningRateWarmup: from one process' learning rate to that of all ranks."""

from __future__ import annotations

from keras_hvd.callbacks.learning_rate_schedule import LearningRateSchedule
from keras_hvd.job import basics


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from `initial_lr / size()` to `initial_lr`, linearly.

    With the learning rate multiplied by the number of ranks, the first epochs often
    diverge; this callback starts with the rate of one process (Goyal et al., 2017). On
    one rank the rate is always `initial_lr`.

    Args:
        initial_lr: the rate after the warmup, usually one process' times `size()`.
        warmup_epochs: length of the warmup; 0 does nothing.
        momentum_correction: as for `LearningRateSchedule`.
        steps_per_epoch: number of batches in an epoch, if Keras does not know it.
        verbose: 1: rank 0 prints a line at the end of the warmup.

    Raises:
        TypeError: the optimizer's learning rate is a schedule or a function, which
            cannot be set (when training begins); see `keras_hvd.warmup_schedule`.
        ValueError: `initial_lr` is not a number; or, when training begins, the
            optimizer is a `MultiOptimizer`, or `steps_per_epoch` is missing.

    Example:

    >>> import keras, keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.4))
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(optimizer, "mse")
    >>> warmup = keras_hvd.callbacks.LearningRateWarmup(0.4, warmup_epochs=3)
    >>> history = model.fit(np.ones((4, 1)), np.zeros(4), verbose=0, callbacks=[warmup])
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        super().__init__(
            initial_lr,
            multiplier=self._multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        last = epoch < self.warmup_epochs <= epoch + 1
        if last and self.verbose and basics.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: warmup ended, the learning rate is {rate:g}.")

    def _multiplier(self, epoch: float) -> float:
        # One step ahead: the last step of the warmup has the full rate.
        done = min(1.0, (epoch + 1 / self._steps) / self.warmup_epochs)
        return (1 + done * (basics.size() - 1)) / basics.size()
