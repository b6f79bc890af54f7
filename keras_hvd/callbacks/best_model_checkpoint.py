"""BestModelCheckpoint: the best model so far, in one file."""

from __future__ import annotations

import os

import keras

from keras_hvd.callbacks.coordination import DistributedCallback

# Keras needs a file name in the constructor, and checks its suffix.
_NOT_GIVEN = "not given.keras"


class BestModelCheckpoint(DistributedCallback, keras.callbacks.ModelCheckpoint):
    """Saves the model on rank 0 whenever it is better than before.

    It is `keras.callbacks.ModelCheckpoint` with `save_best_only=True`. Its `filepath`
    is an argument, or an attribute to set before training begins. Put `MetricAverage`
    before it; otherwise it decides by rank 0's data alone.

    Args:
        monitor: the name of the log that decides.
        verbose: 1: a line whenever the model is saved or not.
        save_weights_only: whether to save only the weights; the file then ends with
            `.weights.h5`.
        mode: `"min"`, `"max"`, or `"auto"`: by the name.
        save_freq: `"epoch"`, or a number of batches.
        filepath: the file; it ends with `.keras` unless `save_weights_only`.

    Raises:
        ValueError: there is no `filepath` (when training begins), it has another
            suffix, or `save_freq` is invalid.

    Example:

    >>> import tempfile, keras, keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    >>> best = keras_hvd.callbacks.BestModelCheckpoint(monitor="loss")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     best.filepath = f"{folder}/best.keras"
    ...     history = model.fit(np.ones((4, 1)), np.zeros(4), verbose=0,
    ...         callbacks=[keras_hvd.callbacks.MetricAverage(), best])
    ...     model = keras_hvd.load_model(best.filepath)
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | os.PathLike | None = None,
    ):
        super().__init__(
            filepath=_NOT_GIVEN if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def check_order(self, others, place):
        self._require_filepath()

    def on_train_begin(self, logs=None):
        self._require_filepath()
        super().on_train_begin(logs)

    def _require_filepath(self):
        if self.filepath in (None, _NOT_GIVEN):
            raise ValueError(
                "BestModelCheckpoint does not know where to save: give it filepath=, "
                "or set its attribute filepath before fit()"
            )
