"""Callbacks of Keras that write files, or to a server: on rank 0 alone.

On other ranks they do everything else: they get the model, decide what is best, and
call the methods that a subclass adds, which may take part in collectives.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from keras_hvd.job.temporary import temporarily


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stands for a method that writes."""


class _SilentBackupAndRestore(keras.callbacks.BackupAndRestore):
    # All ranks get the state that rank 0 restores.
    on_train_begin = on_train_end = _load_model = _save_model = _nothing


class _SilentCSVLogger(keras.callbacks.CSVLogger):
    filename: Any

    def on_train_begin(self, logs=None):
        with temporarily(self, "filename", os.devnull):
            super().on_train_begin(logs)


class _SilentModelCheckpoint(keras.callbacks.ModelCheckpoint):
    verbose: Any

    def _save_model(self, epoch, batch, logs):
        # Rank 0 warns.
        with temporarily(self, "verbose", 0), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # This also keeps the best value.
            self._should_save_model(epoch, batch, logs, self.filepath)


class _SilentRemoteMonitor(keras.callbacks.RemoteMonitor):
    on_epoch_end = _nothing


class _SilentTensorBoard(keras.callbacks.TensorBoard):
    # Subclasses write summaries of their own with these.
    @property
    def _train_writer(self):
        return self.summary.create_noop_writer()

    @property
    def _val_writer(self):
        return self.summary.create_noop_writer()

    on_train_batch_end = on_test_end = _nothing
    _write_keras_model_summary = _write_keras_model_train_graph = _nothing
    _configure_embeddings = _log_embeddings = _nothing
    _log_epoch_metrics = _log_weights = _nothing
    _push_writer = _pop_writer = _nothing
    _start_trace = _stop_trace = _start_profiler = _stop_profiler = _nothing


_SILENT: dict[type, type] = {
    keras.callbacks.BackupAndRestore: _SilentBackupAndRestore,
    keras.callbacks.CSVLogger: _SilentCSVLogger,
    keras.callbacks.ModelCheckpoint: _SilentModelCheckpoint,
    keras.callbacks.RemoteMonitor: _SilentRemoteMonitor,
    keras.callbacks.TensorBoard: _SilentTensorBoard,
}
if hasattr(keras.callbacks, "OrbaxCheckpoint"):
    # Only newer versions of Keras have it.
    _Orbax = keras.callbacks.OrbaxCheckpoint
    _SILENT[_Orbax] = type(
        "_SilentOrbaxCheckpoint", (_Orbax,), {"_save_checkpoint": _nothing}
    )

for _plain, _silent in _SILENT.items():
    # Messages name a callback by its class, which is the user's on every rank.
    _silent.__name__, _silent.__qualname__ = _plain.__name__, _plain.__qualname__

WRITERS = tuple(_SILENT)
"""Keras' classes that write."""

SILENT_WRITERS = tuple(_SILENT.values())
"""Their replacements on ranks other than 0."""


def let_write(callbacks: Iterable[keras.callbacks.Callback], writes: bool) -> None:
    """Stops the writing of Keras' callbacks, of their subclasses, and in wrappers.

    Or lets them write again: a rank of one job may be the first of the next. Those with
    an attribute `every_rank = True` write in any case.

    Example:

    >>> logger = keras.callbacks.CSVLogger("/nowhere/log.csv")
    >>> let_write([logger], False)
    >>> logger.on_train_begin()
    >>> logger.filename
    '/nowhere/log.csv'
    >>> let_write([logger], True)
    >>> type(logger).__name__
    'CSVLogger'
    """
    for each in callbacks:
        _let_write(each, writes, set())


def _let_write(callback: Any, writes: bool, seen: set[int]) -> None:
    if id(callback) in seen or getattr(callback, "every_rank", False):
        return
    seen.add(id(callback))
    plain: type = type(callback)
    is_silent = isinstance(callback, SILENT_WRITERS)
    # In place: others may hold it, and it may hold state.
    if is_silent and writes:
        callback.__class__ = plain.__bases__[0]
    elif isinstance(callback, WRITERS) and not is_silent and not writes:
        callback.__class__ = _silent_class(plain)
    for inner in callbacks_in(callback):
        _let_write(inner, writes, seen)


def writers_among(callbacks: Iterable[keras.callbacks.Callback]) -> list[str]:
    """The names of callbacks of Keras, and of subclasses, that write on rank 0 alone.

    Example:

    >>> writers_among([keras.callbacks.CSVLogger("log.csv"), keras.callbacks.History()])
    ['CSVLogger']
    """
    return [
        type(each).__name__
        for each in callbacks
        if isinstance(each, WRITERS) and not getattr(each, "every_rank", False)
    ]


def callbacks_in(callback: keras.callbacks.Callback) -> Iterator[Any]:
    """The callbacks that a callback holds in attributes, such as a wrapper's."""
    held = list(held_by(callback))
    return (each for each in held if isinstance(each, keras.callbacks.Callback))


def held_by(callback: keras.callbacks.Callback) -> Iterator[Any]:
    """The objects in a callback's attributes, also in their lists and dicts."""
    for value in vars(callback).values():
        if isinstance(value, dict):
            value = list(value.values())
        yield from value if isinstance(value, (list, tuple)) else [value]


@functools.cache
def _silent_class(plain: type) -> type:
    """A subclass whose `super()` in the plain class finds methods that do not write."""
    if plain in _SILENT:
        return _SILENT[plain]
    silent = [_SILENT[each] for each in WRITERS if issubclass(plain, each)]
    names = ("__doc__", "__module__", "__qualname__")
    return type(plain)(
        plain.__name__, (plain, *silent), {name: getattr(plain, name) for name in names}
    )
