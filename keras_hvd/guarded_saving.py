"""What saves a model does so only once its steps are known to have ended well.

On a GPU a step's collectives run long after the call that asked for them. When the job
fails they are aborted: the GPU runs on over whatever is in their buffers, and updates
weights with it, while the host has seen no error yet. Where a step itself raises, on a
CPU too, some weights may be updated and others not.

The engine notes a failure before it aborts anything. So whoever waits for the GPU
first, and asks the engine then, knows that all that the GPU has done is good.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from keras_hvd import exceptions
from keras_hvd.runtime import native

# Where all ways of saving come through: a model's own methods, Keras' functions and
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


@functools.cache
def install() -> None:
    """Has nothing save a model, from now on, that may be of an aborted step.

    Raises:
        RuntimeError: this version of Keras saves in another way.

    Example:

    >>> install()
    """
    for owner, name in _PLACES:
        _guard(owner, name)
    # Newer versions of Keras have it.
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", None)
    if orbax is not None:
        _guard(orbax, "_save_checkpoint")


def require_good_steps() -> None:
    """Waits for the GPUs, and raises if what they have done may be worth nothing.

    Raises:
        RankFailedError: the job has failed.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> require_good_steps()
    """
    engine = native.engine()
    # A failure that is noted later than this belongs to none of these steps.
    if engine.khvd_size() != 1 and _may_run_ahead():
        tf.test.experimental.sync_devices()
    failure = engine.khvd_failure().decode(errors="replace")
    if failure:
        raise exceptions.RankFailedError(
            "nothing is saved any more, for the weights may be those of a step that "
            f"was aborted: {failure}. Start the job again, from what was saved last"
        )


def _may_run_ahead() -> bool:
    return tf.executing_eagerly() and bool(tf.config.list_logical_devices("GPU"))


def _guard(owner: Any, name: str) -> None:
    plain = getattr(owner, name, None)
    if plain is None:
        raise RuntimeError(
            f"{owner.__name__} has no {name}, which keras_hvd has to guard, in Keras "
            f"{keras.__version__} and TensorFlow {tf.__version__}: use other versions"
        )

    @functools.wraps(plain)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        require_good_steps()
        return plain(*args, **kwargs)

    setattr(owner, name, guarded)
