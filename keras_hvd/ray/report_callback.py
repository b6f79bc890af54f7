"""ReportCallback: tells Ray Train the metrics, with a model to resume from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import ray.train

from keras_hvd.callbacks.coordination import DistributedCallback
from keras_hvd.callbacks.metric_average import MetricAverage
from keras_hvd.callbacks.metrics import means_over_ranks
from keras_hvd.job import basics
from keras_hvd.optimizer.loading import load_model

MODEL = "model.keras"
_EPOCH = "epoch.json"

# Whenever they ask, all workers wait for each other, 1.5 ms on one host.
_BATCHES_BETWEEN_QUESTIONS = 50


class ReportCallback(DistributedCallback):
    """Gives Ray Train an epoch's logs over all ranks, and rank 0's model.

    All ranks report, since Ray waits for all of them. If Ray is about to take a node
    away, a model is reported at once. `keras_hvd.ray.resume` goes on from it.

    Args:
        every: `"epoch"`, or a number of batches, after which a model is reported
            within an epoch, too.

    Raises:
        ValueError: `every` is something else; or `MetricAverage` comes after it (when
            training begins).

    Example::

        model.fit(x, y, callbacks=[
            keras_hvd.callbacks.BroadcastGlobalVariables(0),
            keras_hvd.callbacks.MetricAverage(),
            keras_hvd.ray.ReportCallback(),
        ])
    """

    def __init__(self, every: str | int = "epoch"):
        if every != "epoch" and not (isinstance(every, int) and every > 0):
            raise ValueError(
                f"ReportCallback: every must be 'epoch' or a number of batches, got "
                f"{every!r}"
            )
        super().__init__()
        self.every = every
        self._epoch = 0
        self._batches = 0
        self._is_warned = False

    def check_order(self, others, place):
        if any(isinstance(each, MetricAverage) for each in others[place:]):
            raise ValueError(
                "ReportCallback reports logs, so put MetricAverage before it"
            )

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._batches += 1
        if self._is_due() or self._is_to_be_preempted():
            self._report(logs or {}, self._epoch)

    def on_epoch_end(self, epoch, logs=None):
        self._report(logs or {}, epoch + 1)

    def _is_due(self) -> bool:
        return self.every != "epoch" and self._batches % int(self.every) == 0

    def _is_to_be_preempted(self) -> bool:
        """Whether Ray says so for the first time."""
        if self._is_warned or self._batches % _BATCHES_BETWEEN_QUESTIONS:
            return False
        self._is_warned = ray.train.get_preemption_info() is not None
        return self._is_warned

    def _report(self, logs: dict[str, Any], done: int) -> None:
        means = {**means_over_ranks(logs), "epoch": done}
        if basics.rank() != 0:
            ray.train.report(means)
            return
        with tempfile.TemporaryDirectory() as folder:
            self.model.save(Path(folder, MODEL))
            Path(folder, _EPOCH).write_text(json.dumps(done))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(means, checkpoint=checkpoint)


def resume(build: Callable[[], keras.Model]) -> tuple[keras.Model, int]:
    """The model that `ReportCallback` reported last, or a new one; and its epoch.

    Call it on all ranks.

    Args:
        build: makes and compiles the model.

    Returns:
        The model, and the epoch with which `fit` is to go on, as its `initial_epoch`:
        0 for a new model. A model of within an epoch begins that epoch again.

    Raises:
        RuntimeError: this process is no worker of Ray Train.

    Example::

        model, epoch = keras_hvd.ray.resume(build)
        model.fit(x, y, epochs=10, initial_epoch=epoch, callbacks=callbacks)
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return build(), 0
    with checkpoint.as_directory() as folder:
        epoch = json.loads(Path(folder, _EPOCH).read_text())
        return load_model(Path(folder, MODEL)), epoch
