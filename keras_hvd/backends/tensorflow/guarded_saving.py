"""Saves models only after their steps are known to have succeeded, as whole files.

On a GPU, a step's collectives run long after their call. If the job fails, they are
aborted, and the GPU updates weights with garbage before the host sees an error. If a
step raises an error, on a CPU too, only some weights may be updated.

The engine records a failure before it aborts anything. So if the engine reports none
after a wait for the GPU, the GPU's results are valid. In a later job of this process,
variables of the failed one are not saved before they have got other values
(`half_applied`).

Ranks may save to one path at once, as scripts without a look at the rank do: each file
comes to be whole, of one rank (`whole_files`). Saving can be no collective, since
mostly rank 0 saves alone.

A job of `khvdrun --scaling` is ended after some steps, and its weights may be
worthless: it saves nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from tensorflow.python.checkpoint import graph_view, util
from tensorflow.python.checkpoint.checkpoint import TrackableSaver
from tensorflow.python.saved_model import save as saved_model

from keras_hvd import exceptions
from keras_hvd.backends.tensorflow import half_applied
from keras_hvd.backends.whole_files import save_whole, share_backups
from keras_hvd.job import native
from keras_hvd.recording import recorder

# All ways of saving use one of these: a model's methods, Keras' functions and
# callbacks, and TensorFlow's checkpoints. The last string names the second argument
# where that is the path that is written to.
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
    # These three save with it.
    (TrackableSaver, "save", "file_prefix"),
)

# Functions that give variables whole values.
_SOURCES = (
    (saving_lib, "load_weights_only"),
    (legacy_h5_format, "load_weights_from_hdf5_group"),
    (legacy_h5_format, "load_weights_from_hdf5_group_by_name"),
    (keras.Layer, "set_weights"),
    (tf.train.Checkpoint, "read"),
    (tf.train.Checkpoint, "restore"),
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
    for owner, name in _SOURCES:
        _note_failure_before(owner, name)
    # Only newer versions of Keras have it. Orbax itself renames complete files.
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", None)
    if orbax is not None:
        _guard(orbax, "_save_checkpoint")
    share_backups(keras.callbacks.BackupAndRestore, _may_be_shared)
    if recorder.scaling():
        # It keeps files of its own beside the weights, and would resume from them.
        for name in _BACKUP_METHODS:
            method = getattr(keras.callbacks.Callback, name)
            setattr(keras.callbacks.BackupAndRestore, name, method)


def allow_saving() -> None:
    """Says that this rank's variables are whole, so that they may be saved.

    After a rank's death the others' last step may have been applied in part. So in the
    next job of these processes (`shutdown`, then `init`) no model of the failed one is
    saved before all its variables have been loaded, broadcast from a rank that has
    loaded them, or assigned. Call this instead if you know that they are whole; for
    example, because all ranks have compared them.

    Raises:
        RankFailedError: this process is still in the job that has failed, or has not
            joined another one.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.allow_saving()
    """
    _require_no_failure()
    half_applied.trust_all()


def require_good_steps(subject: Any = None) -> None:
    """Waits for the GPUs, and raises a `RankFailedError` if the job has failed.

    Raises it too if `subject`, a model or checkpoint, has variables of an earlier job
    that has failed.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> require_good_steps()
    """
    engine = native.engine()
    # A failure recorded after this wait does not affect these steps.
    may_run_ahead = engine.khvd_size() != 1 and tf.executing_eagerly()
    if may_run_ahead and tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()
    _require_no_failure()
    if subject is None or not half_applied.any_suspect():
        return
    why = half_applied.why_suspect(_variables_of(subject))
    if why:
        raise exceptions.RankFailedError(
            f"this is not saved: {why}. Load a checkpoint, or broadcast the variables "
            "from a rank that has loaded it; or call keras_hvd.allow_saving() if you "
            "know that they are whole"
        )


def _require_no_failure() -> None:
    half_applied.note_failure()
    failure = native.engine().khvd_failure().decode(errors="replace")
    if failure:
        raise exceptions.RankFailedError(
            "nothing is saved any more, since the weights may come from an aborted "
            f"step: {failure}. Start the job again from the last checkpoint"
        )


def _variables_of(subject: Any) -> list[Any]:
    """The variables that a save of a model, callback or checkpoint writes."""
    if isinstance(subject, TrackableSaver):
        # Its checkpoint has been checked.
        return []
    if isinstance(subject, keras.callbacks.Callback):
        subject = subject.model
    if isinstance(subject, tf.train.CheckpointManager):
        subject = subject.checkpoint
    if isinstance(subject, keras.Model):
        optimizers = [
            each
            for each in vars(subject).values()
            if isinstance(each, keras.optimizers.Optimizer)
        ]
        return [*subject.weights, *(v for each in optimizers for v in each.variables)]
    return _variables_below(subject)


def _variables_below(root: Any) -> list[Any]:
    found = util.list_objects(graph_view.ObjectGraphView(root))
    # Epochs reset them, or they only count.
    passing = [getattr(root, "_save_counter", None)]
    for each in found:
        if isinstance(each, keras.metrics.Metric):
            passing += each.variables
        if isinstance(each, keras.random.SeedGenerator):
            passing.append(each.state)
    kinds = (tf.Variable, keras.Variable)
    return [
        each
        for each in found
        if isinstance(each, kinds) and not any(each is other for other in passing)
    ]


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
        with recorder.saving():
            return _save(args, kwargs)

    def _save(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        require_good_steps(args[0])
        given: Any = kwargs.get(path, args[1] if len(args) > 1 else None)
        if path and _may_be_shared(given):
            return _save_whole(plain, path, given, args, kwargs)
        return plain(*args, **kwargs)

    setattr(owner, name, guarded)


def _note_failure_before(owner: Any, name: str) -> None:
    """Notes a failed job before each call, so that the call's assignments count."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def noted(*args: Any, **kwargs: Any) -> Any:
        half_applied.note_failure()
        return plain(*args, **kwargs)

    setattr(owner, name, noted)


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
    """Calls a function that saves to `path`, its second argument: the file is whole."""
    result, own = save_whole(plain, argument, path, args, kwargs)
    if not tf.is_tensor(result):
        return result
    # The name of a checkpoint.
    return result.numpy().decode().replace(own, os.fspath(path))
