"""Callbacks of `fit` that keep an elastic training's state up to date."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import keras

from keras_hvd.callbacks.coordination import DistributedCallback, calling
from keras_hvd.elastic.state import State, require_state
from keras_hvd.job import basics


class _UpdateStateCallback(DistributedCallback):
    """Sets an attribute of a state.

    `CommitStateCallback` calls the hooks too: they must give the same a second time.
    """

    def __init__(self, state: State, name: str):
        super().__init__()
        kind = type(self).__name__
        require_state(kind, state)
        if not hasattr(state, name):
            raise ValueError(
                f"{kind}: the state has no {name}: make it with {name}=0, as in "
                f"keras_hvd.elastic.KerasState(model, {name}=0)"
            )
        self.state: Any = state


class CommitStateCallback(DistributedCallback):
    """Commits a state after every so many batches, and at the end of each epoch.

    What the other two callbacks keep in the state is up to date by then, in whatever
    order they are given to `fit`.

    Args:
        state: the state to commit.
        batches_per_commit: the number of batches between two commits. A commit copies
            the model, and a rank's death costs what was trained since.

    Raises:
        TypeError: `state` is not a State, or `batches_per_commit` is not a number.
        ValueError: `batches_per_commit` is not positive.

    Example:

    >>> import keras_hvd
    >>> state = keras_hvd.elastic.ObjectState(epoch=0)
    >>> callback = keras_hvd.elastic.CommitStateCallback(state, batches_per_commit=50)
    """

    def __init__(self, state: State, batches_per_commit: int = 1):
        super().__init__()
        require_state("CommitStateCallback", state)
        batches_per_commit = basics.whole_number(
            "CommitStateCallback", "batches_per_commit", batches_per_commit
        )
        if batches_per_commit < 1:
            raise ValueError(
                f"CommitStateCallback: batches_per_commit={batches_per_commit} must be "
                "at least 1"
            )
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._committed = 0
        self._updates: list[_UpdateStateCallback] = []

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        called_by = calling(keras.callbacks.CallbackList)
        self._updates = [
            each
            for each in (called_by.callbacks if called_by else ())
            if isinstance(each, _UpdateStateCallback)
        ]

    def on_epoch_begin(self, epoch, logs=None):
        self._committed = 0

    def on_train_batch_end(self, batch, logs=None):
        # With steps_per_execution, `batch` is the last step's.
        if batch + 1 - self._committed < self.batches_per_commit:
            return
        self._committed = batch + 1
        for each in self._updates:
            each.on_train_batch_end(batch, logs)
        self.state.commit()

    def on_epoch_end(self, epoch, logs=None):
        for each in self._updates:
            each.on_epoch_end(epoch, logs)
        self.state.commit()


class UpdateBatchStateCallback(_UpdateStateCallback):
    """Keeps in `state.batch` the number of batches that the epoch has had.

    At the end of an epoch it is 0. An epoch that begins with another number is the rest
    of one: with `steps_per_epoch`, `fit` makes only the steps that are left of it, or
    one if none are. Without it, give `fit` the data that are left.

    Args:
        state: a state with a `batch`.

    Raises:
        TypeError: `state` is not a State.
        ValueError: it has no `batch`.

    Example:

    >>> import keras_hvd
    >>> state = keras_hvd.elastic.ObjectState(batch=0)
    >>> callback = keras_hvd.elastic.UpdateBatchStateCallback(state)
    """

    def __init__(self, state: State):
        super().__init__(state, "batch")
        self._before = 0
        self._steps: int | None = None
        self._iterator: Any = None

    def on_epoch_begin(self, epoch, logs=None):
        self._before = self.state.batch
        self._iterator = _iterator_of_fit() if self._before else None
        self._steps = getattr(self._iterator, "steps_per_epoch", None)
        if self._steps:
            # Keras has no public way to make fewer steps in one epoch.
            self._iterator.steps_per_epoch = max(self._steps - self._before, 1)

    def on_train_batch_end(self, batch, logs=None):
        self.state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch, logs=None):
        self.state.batch = 0
        if not self._steps:
            return
        self._iterator.steps_per_epoch = self._steps
        if self._iterator._num_batches is not None:
            # Data that end would end too early in a later epoch.
            self._iterator._current_iterator = None


class UpdateEpochStateCallback(_UpdateStateCallback):
    """Adds each epoch that has ended to `state.epoch`.

    So `fit` may be given `initial_epoch=state.epoch`, or `epochs=total - state.epoch`.

    Args:
        state: a state with an `epoch`.

    Raises:
        TypeError: `state` is not a State.
        ValueError: it has no `epoch`.

    Example:

    >>> import keras_hvd
    >>> state = keras_hvd.elastic.ObjectState(epoch=0)
    >>> callback = keras_hvd.elastic.UpdateEpochStateCallback(state)
    """

    def __init__(self, state: State):
        super().__init__(state, "epoch")
        self._next = 0

    def on_epoch_begin(self, epoch, logs=None):
        # Not from `epoch`, which may count from the last change of the job.
        self._next = self.state.epoch + 1

    def on_epoch_end(self, epoch, logs=None):
        self.state.epoch = self._next


def _iterator_of_fit() -> Any:
    """The iterator of the `fit` that calls; None where there is no `fit`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if "epoch_iterator" in frame.f_locals:
            return frame.f_locals["epoch_iterator"]
        frame = frame.f_back
    return None
