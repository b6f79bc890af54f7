"""BackupAndRestore: training continues where it was, also in the middle of the data."""

from __future__ import annotations

import json
import os
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from keras_hvd.backends.current import framework
from keras_hvd.callbacks.broadcast_global_variables import BroadcastGlobalVariables
from keras_hvd.callbacks.coordination import DistributedCallback
from keras_hvd.job import basics, log
from keras_hvd.job.objects import broadcast_object

if TYPE_CHECKING:
    from keras_hvd.data.position import Position

_STATE = "training.json"


class BackupAndRestore(DistributedCallback):
    r"""Saves the training, and continues from the saved state if there is one.

    It is like `keras.callbacks.BackupAndRestore`, but also works within an epoch: with
    a `Position`, training continues after the last saved step, on any number of ranks,
    and trains on each sample exactly once in that epoch. Weights and position are saved
    together; a job that is killed meanwhile leaves the previous backup. The model must
    have its variables before `fit`. Only rank 0 reads and writes files, and on several
    ranks `BroadcastGlobalVariables(0)` gives all ranks what it has read.

    `fit` must see the end of each epoch: no `steps_per_epoch`, no `dataset.repeat()`.
    The position follows `fit`'s epochs. Samples that `even(mode="drop")` leaves at the
    end of an epoch are skipped.

    Args:
        backup_dir: a folder for the backup only.
        position: that of the data; None to save and restore only at the end of epochs.
        batch_size: number of samples that this rank takes in a step; needed with a
            position.
        save_freq: "epoch", or a number of steps; the end of each epoch is saved too.
        delete_checkpoint: whether to delete the backup at the end of training.

    Raises:
        TypeError: `position` is not a Position, or `batch_size` or `save_freq` is not a
            number.
        ValueError: a number is not positive, or given without `position`.

    Example:

    >>> import keras, keras_hvd, pathlib, tempfile, tensorflow as tf
    >>> keras_hvd.init()
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "numbers.txt").write_text("1\n2\n3\n4\n")
    >>> position = keras_hvd.data.Position()
    >>> numbers = keras_hvd.data.from_files(
    ...     str(folder / "*.txt"), "text", position=position)
    >>> numbers = numbers.map(lambda line: [tf.strings.to_number(line)]).batch(2)
    >>> model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    >>> model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    >>> history = model.fit(numbers.map(lambda x: (x, x)), epochs=2, verbose=0,
    ...     callbacks=[keras_hvd.callbacks.BroadcastGlobalVariables(0),
    ...         keras_hvd.callbacks.BackupAndRestore(
    ...             str(folder / "backup"), position, batch_size=2, save_freq=1)])
    >>> position.epoch
    2
    """

    def __init__(
        self,
        backup_dir: str,
        position: Position | None = None,
        batch_size: int | None = None,
        save_freq: Literal["epoch"] | int = "epoch",
        delete_checkpoint: bool = True,
    ):
        super().__init__()
        if position is not None:
            _require_position(position)
        if position is None and not (batch_size is None and save_freq == "epoch"):
            raise ValueError(
                "BackupAndRestore: batch_size and save_freq take a position: without "
                "one, training can only go on from the beginning of an epoch"
            )
        if position is not None:
            batch_size = _positive("batch_size", batch_size)
        if save_freq != "epoch":
            save_freq = _positive("save_freq", save_freq)
        self.backup_dir = os.fspath(backup_dir)
        self.position = position
        self.batch_size: Any = batch_size  # a number where there is a position
        self.save_freq: Literal["epoch"] | int = save_freq
        self.delete_checkpoint = delete_checkpoint
        self._epoch = 0
        self._steps = 0  # in the epoch
        self._steps_before = 0  # in the epoch, by the job that it goes on from
        self._saved_at = 0  # the value of `_steps` at the last save
        self._written = ""  # the file of weights that belongs to the backup

    def check_order(self, others, place):
        # Rank 0 alone reads the weights.
        for each in others:
            if isinstance(each, BroadcastGlobalVariables) and each.root_rank == 0:
                return
        raise ValueError(
            "BackupAndRestore needs BroadcastGlobalVariables(0) among the callbacks, "
            "because only rank 0 restores the model"
        )

    def on_train_begin(self, logs=None):
        if not self.model.built:
            raise ValueError(
                f"BackupAndRestore: model {self.model.name!r} has no variables yet: "
                "call model.build(input_shape), or the model on a batch, before fit()"
            )
        found = self._restore_model() if basics.rank() == 0 else None
        found = broadcast_object(found, 0, name="keras_hvd/backup")
        if isinstance(found, Exception):
            raise found
        if found is None:
            return
        self.model._initial_epoch = found["epoch"]
        if self.position is not None and found["position"] is not None:
            self.position.restore(found["position"])
            # Backups of earlier versions do not say.
            self._steps_before = found.get("steps", 0)
        if basics.rank() == 0:
            print(self._resumed(found["epoch"]), flush=True)

    def _resumed(self, epoch: int) -> str:
        """Says where training goes on, counted as Keras' progress bar counts."""
        folder = os.path.join(self.backup_dir, "")
        if epoch >= (self.params or {}).get("epochs", epoch + 1):
            return f"Nothing is left to train: {folder} was saved after epoch {epoch}"
        step = f", after step {self._steps_before}," if self._steps_before else ""
        return f"Resumed at epoch {epoch + 1}{step} from {folder}"

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._steps = self._saved_at = 0
        position = self.position
        if position is not None and position.epoch != epoch:
            position.start_epoch(epoch)
        self._is_rest = position is not None and position.is_inside_epoch
        self._iterations = 0 if position is None else position.iterations
        if not self._is_rest:
            self._steps_before = 0

    def on_train_batch_end(self, batch, logs=None):
        # With steps_per_execution, `batch` is the last step's.
        steps = batch + 1 - self._steps
        self._steps = batch + 1
        if self.position is None:
            return
        self._require_one_iteration(self.position)
        self.position.advance_at_most(steps * self.batch_size)
        if self.save_freq == "epoch" or self._steps - self._saved_at < self.save_freq:
            return
        self._saved_at = self._steps
        self._save(self._epoch, self._steps_before + self._steps)

    def on_epoch_end(self, epoch, logs=None):
        if self.position is not None:
            self._warn_of_many_left(self.position)
            self.position.end_epoch()
        if self._is_rest:
            _forget_number_of_steps()
        self._save(epoch + 1, 0)

    def on_train_end(self, logs=None):
        if not self.delete_checkpoint or basics.rank() != 0:
            return
        if framework.gfile.exists(self.backup_dir):
            framework.gfile.rmtree(self.backup_dir)

    def _require_one_iteration(self, position: Position) -> None:
        begun = position.iterations - self._iterations
        if begun == 1:
            return
        raise RuntimeError(
            f"BackupAndRestore: epoch {self._epoch} of fit() is not one iteration of "
            f"the dataset of its Position, but {begun}: leave out "
            "steps_per_epoch and dataset.repeat(), so that fit() sees where an epoch "
            "ends, and give fit() the dataset that the position was given to"
        )

    def _warn_of_many_left(self, position: Position) -> None:
        left = position.left
        taken = self._steps * self.batch_size
        if left < max(taken, 2 * self.batch_size):
            return
        log.warn(
            f"BackupAndRestore: at the end of epoch {self._epoch}, {left} samples of "
            f"rank {basics.rank()} had been read and not trained on, more than the "
            f"{taken} that had: is its batch_size={self.batch_size} the dataset's?",
            from_any_rank=True,
        )

    # --- files -----------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return os.path.join(self.backup_dir, name)

    def _save(self, epoch: int, steps: int) -> None:
        position = None if self.position is None else self.position.state()
        if basics.rank() != 0:
            return
        framework.gfile.makedirs(self.backup_dir)
        # The previous backup stays whole until the state names the new weights.
        weights = "b" if self._written.startswith("a") else "a"
        weights = f"{weights}.weights.h5"
        self.model.save_weights(self._path(weights), overwrite=True)
        place = {"epoch": epoch, "steps": steps, "position": position}
        with framework.gfile.GFile(self._path(f"{_STATE}.new"), "w") as file:
            file.write(json.dumps({"weights": weights, **place}))
        framework.gfile.rename(self._path(f"{_STATE}.new"), self._path(_STATE), True)
        self._written = weights

    def _restore_model(self) -> dict[str, Any] | Exception | None:
        """Rank 0 loads the backup and returns its state, or an error for all ranks."""
        if not framework.gfile.exists(self._path(_STATE)):
            return None
        try:
            with framework.gfile.GFile(self._path(_STATE), "r") as file:
                state = json.loads(file.read())
            optimizer = self.model.optimizer
            if optimizer is not None and not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self.model.load_weights(self._path(state["weights"]))
        except Exception as error:
            return ValueError(
                f"BackupAndRestore: cannot restore from {self.backup_dir!r}: "
                f"{type(error).__name__}: {error}"
            )
        self._written = state["weights"]
        return state


def _require_position(position: Any) -> None:
    # Not at the top: it needs TensorFlow.
    from keras_hvd.data.position import Position

    if not isinstance(position, Position):
        raise TypeError(
            f"BackupAndRestore: position must be a Position, got {position!r}"
        )


def _positive(argument: str, value: Any) -> int:
    value = basics.whole_number("BackupAndRestore", argument, value)
    if value < 1:
        raise ValueError(f"BackupAndRestore: {argument}={value} must be at least 1")
    return value


def _forget_number_of_steps() -> None:
    """Makes `fit` count the steps of an epoch again.

    It uses the first epoch's number for all, but the rest of an epoch has fewer steps.
    Keras has no public way to change that.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        iterator: Any = frame.f_locals.get("epoch_iterator")
        if hasattr(iterator, "_num_batches"):
            if iterator.data_adapter.num_batches is None:
                iterator._num_batches = None
            return
        frame = frame.f_back
    raise RuntimeError(
        "BackupAndRestore: this version of Keras would use the number of steps in the "
        "rest of an epoch for whole epochs. Train the rest with a fit() of its own, "
        "with epochs=position.epoch + 1, and continue with another"
    )
