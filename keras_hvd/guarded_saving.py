"""Saves models only after their steps are known to have succeeded.

On a GPU, a step's collectives run long after their call. If the job fails, they are
aborted, and the GPU updates weights with garbage before the host sees an error. If a
step raises an error, on a CPU too, only some weights may be updated.

The engine records a failure before it aborts anything. So if the engine reports none
after a wait for the GPU, the GPU's results are valid.

A job of `khvdrun --scaling` is ended after some steps, and its weights may be
worthless: it saves nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from keras_hvd import exceptions
from keras_hvd.report import recorder
from keras_hvd.runtime import native

# All ways of saving use one of these: a model's methods, Keras' functions and
# callbacks, and TensorFlow's checkpoints.
_PLACES = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
    (keras.Model, "export"),
    (tf.train.Checkpoint, "save"),
    (tf.train.Checkpoint, "write"),
    (tf.train.CheckpointManager, "save"),
)

_BACKUP_METHODS = (
    *("on_train_begin", "on_train_end"),
    *("on_epoch_end", "on_train_batch_end"),
)


@functools.cache
def install() -> None:
    """Makes every way of saving a model check for aborted steps first.

    Example:

    >>> install()
    """
    for owner, name in _PLACES:
        _guard(owner, name)
    # Only newer versions of Keras have it.
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", None)
    if orbax is not None:
        _guard(orbax, "_save_checkpoint")
    if recorder.scaling():
        # It keeps files of its own beside the weights, and resumes from what it finds.
        for name in _BACKUP_METHODS:
            method = getattr(keras.callbacks.Callback, name)
            setattr(keras.callbacks.BackupAndRestore, name, method)


def require_good_steps() -> None:
    """Waits for the GPUs, and raises a `RankFailedError` if the job has failed.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> require_good_steps()
    """
    engine = native.engine()
    # A failure recorded after this wait does not affect these steps.
    if engine.khvd_size() != 1 and _may_run_ahead():
        tf.test.experimental.sync_devices()
    failure = engine.khvd_failure().decode(errors="replace")
    if failure:
        raise exceptions.RankFailedError(
            "nothing is saved any more, since the weights may come from an aborted "
            f"step: {failure}. Start the job again from the last checkpoint"
        )


def _may_run_ahead() -> bool:
    return tf.executing_eagerly() and bool(tf.config.list_logical_devices("GPU"))


def _guard(owner: Any, name: str) -> None:
    plain = getattr(owner, name, None)
    if plain is None:
        raise RuntimeError(
            f"{owner.__name__} has no {name} in Keras {keras.__version__} and "
            f"TensorFlow {tf.__version__}, which keras_hvd must guard: use other ones"
        )

    @functools.wraps(plain)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if recorder.scaling():
            return None
        require_good_steps()
        return plain(*args, **kwargs)

    setattr(owner, name, guarded)
