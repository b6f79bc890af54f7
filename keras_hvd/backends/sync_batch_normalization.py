"""The layer SyncBatchNormalization: batch normalization with all ranks' data."""

from __future__ import annotations

from typing import Any

import keras

from keras_hvd.backends.current import framework
from keras_hvd.backends.labels import name_in_program
from keras_hvd.job import basics, later_jobs
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of


@keras.saving.register_keras_serializable(package="keras_hvd")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization with the mean and variance of all ranks' batches.

    Forward and backward passes are those of one process with all the batches, even if
    they differ in size or have masks. Each pass costs one collective of three numbers
    per channel. Every rank must run it in each training step; without training
    (`evaluate`, `predict`) it needs no other rank.

    Args:
        fused: must be False or omitted, as in Horovod.
        process_set: the ranks whose batches count; by default all of them. It is not
            saved with the layer.
        **arguments: those of `keras.layers.BatchNormalization`.

    Raises:
        ValueError: `fused`, `renorm` or `synchronized` is set, or the process set is
            not part of the job.

    Example:

    >>> import keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> layer = keras_hvd.SyncBatchNormalization()
    >>> layer(np.array([[1.0], [3.0]]), training=True).numpy().round(2)
    array([[-1.],
           [ 1.]], dtype=float32)
    """

    def __init__(
        self,
        fused: bool = False,
        process_set: ProcessSet = global_process_set,
        **arguments: Any,
    ):
        for name, given in {"fused": fused, **arguments}.items():
            if name in ("fused", "renorm", "synchronized") and given:
                raise ValueError(
                    f"SyncBatchNormalization does not support {name}={given!r}"
                )
        number_of(process_set, "SyncBatchNormalization")
        super().__init__(**arguments)
        self.process_set = process_set

    def _moments(self, inputs, mask):
        basics.require_initialized("SyncBatchNormalization")
        process_set = self.process_set
        number = number_of(process_set, "SyncBatchNormalization")
        is_alone = process_set.size() == 1 and process_set.included()
        if is_alone and not later_jobs.are_possible():
            framework.require_as_traced("size", process_set=number)
            return super()._moments(inputs, mask)
        name = framework.name_in_graph(f"{name_in_program(self, number)}/moments")
        axes = self._reduction_axes
        return framework.moments_over_ranks(inputs, mask, axes, name, process_set)
