"""Saves models only after their steps are known to have succeeded, as whole files.

On a GPU, a step's collectives run long after their call. If the job fails, they are
aborted, and the GPU updates weights with garbage before the host sees an error. If a
step raises an error, on a CPU too, only some weights may be updated.

The engine records a failure before it aborts anything. So if the engine reports none
after a wait for the GPU, the GPU's results are valid.

Ranks may save to one path at once, as scripts without a look at the rank do: each file
comes to be whole, of one rank (`whole_files`). Saving can be no collective, since
mostly rank 0 saves alone.

A job of `khvdrun --scaling` is ended after some steps, and its weights may be
worthless: it saves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from keras.src.utils import file_utils
from tensorflow.python.checkpoint.checkpoint import TrackableSaver
from tensorflow.python.saved_model import save as saved_model

from keras_hvd import exceptions
from keras_hvd.report import recorder
from keras_hvd.runtime import native
from keras_hvd.whole_files import staged

# All ways of saving use one of these: a model's methods, Keras' functions and
# callbacks, and TensorFlow's checkpoints. With the name of the second argument where
# that is the path that is written to.
_PLACES = (
    (saving_lib, "save_model", "filepath"),
    (saving_lib, "save_weights_only", "filepath"),
    (legacy_h5_format, "save_model_to_hdf5", "filepath"),
    (keras.Model, "export", ""),
    # tf.saved_model.save, and so Keras' exports.
    (saved_model, "save_and_return_nodes", "export_dir"),
    (tf.train.Checkpoint, "save", ""),
    (tf.train.Checkpoint, "write", ""),
    (tf.train.CheckpointManager, "save", ""),
    # What these three do it with.
    (TrackableSaver, "save", "file_prefix"),
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
    for owner, name, path in _PLACES:
        _guard(owner, name, path)
    # Only newer versions of Keras have it. Orbax itself renames what is whole.
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", None)
    if orbax is not None:
        _guard(orbax, "_save_checkpoint")
    _share_backups(keras.callbacks.BackupAndRestore)
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


def _guard(owner: Any, name: str, path: str = "") -> None:
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
        given = kwargs.get(path, args[1] if len(args) > 1 else None)
        if path and _may_be_shared(given):
            return _save_whole(plain, path, given, args, kwargs)
        return plain(*args, **kwargs)

    setattr(owner, name, guarded)


def _may_be_shared(path: Any) -> bool:
    """Whether other ranks may save to a path, and it is one."""
    if not isinstance(path, (str, os.PathLike)) or not tf.executing_eagerly():
        return False
    return native.engine().khvd_size() > 1


def _save_whole(
    plain: Callable[..., Any],
    argument: str,
    path: str | os.PathLike,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Has a function that saves to `path`, its second argument, write a whole file."""
    with staged(path) as own:
        if argument in kwargs:
            result = plain(*args, **{**kwargs, argument: own})
        else:
            result = plain(args[0], own, *args[2:], **kwargs)
    if not tf.is_tensor(result):
        return result
    # The name of a checkpoint.
    return result.numpy().decode().replace(own, os.fspath(path))


def _share_backups(callback: Any) -> None:
    """Lets several ranks keep a backup of Keras in one folder."""
    save, end = callback._save_model, callback.on_train_end

    @functools.wraps(save)
    def save_whole(self: Any) -> None:
        path = self._training_metadata_path
        if not _may_be_shared(path) or file_utils.is_remote_path(path):
            return save(self)
        os.makedirs(self.backup_dir, exist_ok=True)
        try:
            with staged(path) as own:
                # With double_checkpoint, it is copied first.
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(path, own)
                self._training_metadata_path = own
                save(self)
        except FileNotFoundError:
            # Another rank's training has ended, and so has the backup.
            if os.path.exists(self.backup_dir):
                raise
        finally:
            self._training_metadata_path = path

    @functools.wraps(end)
    def end_beside_others(self: Any, logs: Any = None) -> None:
        try:
            end(self, logs)
        except OSError as error:
            # Others delete it too, or still write to it and delete it later.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise

    callback._save_model = save_whole
    callback.on_train_end = end_beside_others
