"""Saves models only after their steps are known to have succeeded, as whole files.

After a rank's death the others' last step may have been applied in part: of two
optimizers one may have updated. So nothing is saved in a job that has failed, nor in a
later job of the process, until the script says that its variables are whole.

Ranks may save to one path at once: each file comes to be whole, of one rank.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import keras
import torch
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from keras_hvd import exceptions
from keras_hvd.backends.torch import process
from keras_hvd.backends.whole_files import save_whole, share_backups
from keras_hvd.job import native
from keras_hvd.recording import recorder

# All ways of saving use one of these. The last string names the second argument where
# that is the path that is written to.
_PLACES = (
    (saving_lib, "save_model", "filepath"),
    (saving_lib, "save_weights_only", "filepath"),
    (legacy_h5_format, "save_model_to_hdf5", "filepath"),
    (keras.Model, "export", ""),
    (torch, "save", "f"),
)

_BACKUP_METHODS = (
    *("on_train_begin", "on_train_end"),
    *("on_epoch_end", "on_train_batch_end"),
)


@functools.cache
def install() -> None:
    """Makes every way of saving a model check for a failure first.

    Example:

    >>> install()
    """
    for owner, name, path in _PLACES:
        _guard(owner, name, path)
    share_backups(keras.callbacks.BackupAndRestore, _may_be_shared)
    if recorder.scaling():
        # It keeps files of its own beside the weights, and would resume from them.
        for name in _BACKUP_METHODS:
            method = getattr(keras.callbacks.Callback, name)
            setattr(keras.callbacks.BackupAndRestore, name, method)


def allow_saving() -> None:
    """Says that this rank's variables are whole, so that they may be saved.

    After a rank's death the others' last step may have been applied in part. So nothing
    is saved in the next jobs of these processes (`shutdown`, then `init`). Call this
    once the variables are whole: you have loaded a checkpoint into all of them, or all
    ranks have compared them.

    Raises:
        RankFailedError: this process is still in the job that has failed, or has not
            joined another one.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.allow_saving()
    """
    present = native.engine().khvd_failure().decode(errors="replace")
    if present:
        raise exceptions.RankFailedError(_text(present))
    process.forget_failure()


def require_good_steps() -> None:
    """Raises a `RankFailedError` if a job of this process has failed.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> require_good_steps()
    """
    if torch.cuda.is_initialized():
        # A failure recorded after this wait does not affect these steps.
        torch.cuda.synchronize()
    failure = process.failure()
    if failure:
        raise exceptions.RankFailedError(_text(failure))


def _text(failure: str) -> str:
    return (
        "nothing is saved any more, since the weights may come from a step that was "
        f"applied in part: {failure}. Start the job again from the last checkpoint; in "
        "a later job of this process, load it and call keras_hvd.allow_saving()"
    )


def _guard(owner: Any, name: str, path: str) -> None:
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if recorder.scaling():
            return None
        with recorder.saving():
            require_good_steps()
            given: Any = kwargs.get(path, args[1] if len(args) > 1 else None)
            if path and _may_be_shared(given):
                return save_whole(plain, path, given, args, kwargs)[0]
            return plain(*args, **kwargs)

    setattr(owner, name, guarded)


def _may_be_shared(path: Any) -> bool:
    """Whether other ranks may save to a path, and it is one."""
    is_path = isinstance(path, (str, os.PathLike))
    return is_path and native.engine().khvd_size() > 1
