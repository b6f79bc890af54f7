"""MetricAverage: an epoch's logs over the data of all ranks."""

from __future__ import annotations

import keras

from keras_hvd.callbacks.coordination import DistributedCallback, described
from keras_hvd.callbacks.metrics import Results, means_over_ranks, results_over_ranks
from keras_hvd.job import basics, log
from keras_hvd.job.objects import allgather_object
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of

# Callbacks of Keras that read an epoch's logs.
_READERS = tuple(
    getattr(keras.callbacks, name)
    for name in (
        "CSVLogger",
        "EarlyStopping",
        "History",
        "ModelCheckpoint",
        "OrbaxCheckpoint",
        "ProgbarLogger",
        "ReduceLROnPlateau",
        "RemoteMonitor",
        "TensorBoard",
    )
    if hasattr(keras.callbacks, name)
)


class MetricAverage(DistributedCallback):
    """Replaces an epoch's logs, of training and validation, by those over all ranks.

    They are exactly those of one process on all the data, even if the parts differ in
    size: the metrics' variables are summed over ranks. Averages of results would be
    wrong for AUC or precision. All metrics of Keras are such sums; a metric of your own
    that keeps a maximum or a last value is not. Logs without a metric of the model,
    such as those of a custom `train_step`, are averaged. Put it before callbacks that
    read logs.

    Args:
        device: without effect; as in Horovod.
        process_set: the ranks whose data count; by default all of them.

    Raises:
        ValueError: the process set is not part of the job; or a callback before it in
            the list reads logs (when training begins).
        RuntimeError: only some ranks have validation data (at the end of an epoch).

    Example:

    >>> import keras, keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    >>> history = model.fit(np.ones((4, 1)), np.zeros(4), verbose=0,
    ...     callbacks=[keras_hvd.callbacks.MetricAverage()])
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set):
        number_of(process_set, "MetricAverage")
        super().__init__()
        self.device = device
        self.process_set = process_set
        self.evaluated: Results = {}
        self._in_epoch = False
        self._trained: Results | None = None
        self._results: Results = {}

    def check_order(self, others, place):
        readers = [each for each in others[:place] if isinstance(each, _READERS)]
        if readers:
            name = described(readers[0])
            raise ValueError(
                f"put MetricAverage before {name} in the list of callbacks: as it is, "
                f"{name} reads the logs of this rank alone"
            )
        for name in (described(each) for each in others[:place] if _may_read(each)):
            log.warn(
                f"{name} comes before MetricAverage in the list of callbacks: its "
                "on_epoch_end gets the logs of this rank alone",
                stacklevel=2,
            )

    def on_train_begin(self, logs=None):
        self._in_epoch = False

    def on_epoch_begin(self, epoch, logs=None):
        self._in_epoch = True
        self._trained = None

    def on_test_begin(self, logs=None):
        # The metrics still hold training's values: Keras resets them after this.
        if basics.size() > 1 and self._in_epoch and self._trained is None:
            self._trained = results_over_ranks(self.model, self.process_set)

    def on_test_end(self, logs=None):
        if basics.size() == 1 or self._in_epoch or logs is None:
            return
        _replace(
            logs,
            means_over_ranks(logs, self.process_set),
            results_over_ranks(self.model, self.process_set),
        )
        self.evaluated = dict(logs)

    def on_epoch_over(self):
        # Here, before another callback evaluates the model, which resets its metrics.
        validated = self._trained is not None
        # The collectives have the same order with and without validation.
        trained = (
            results_over_ranks(self.model, self.process_set)
            if self._trained is None
            else self._trained
        )
        _require_same_validation(
            allgather_object(
                validated, name="keras_hvd/validated", process_set=self.process_set
            )
        )
        results = results_over_ranks(self.model, self.process_set) if validated else {}
        validation = {f"val_{name}": value for name, value in results.items()}
        self._results = {**trained, **validation}

    def on_epoch_end(self, epoch, logs=None):
        self._in_epoch = False
        if basics.size() > 1 and logs is not None:
            _replace(logs, means_over_ranks(logs, self.process_set), self._results)


def _replace(logs: Results, means: Results, results: Results) -> None:
    """Replaces logs by results, or by means if there is no result."""
    logs.update({name: results.get(name, means.get(name, logs[name])) for name in logs})


def _may_read(callback: keras.callbacks.Callback) -> bool:
    # LambdaCallback keeps its function as an attribute.
    if "on_epoch_end" in vars(callback):
        return True
    if type(callback).__module__.startswith(("keras.", "keras_hvd.")):
        return False
    return type(callback).on_epoch_end is not keras.callbacks.Callback.on_epoch_end


def _require_same_validation(validates: list[bool]) -> None:
    """Raises, on every rank, if only some ranks validate, because they would hang."""
    if len(set(validates)) == 1:
        return
    missing = ", ".join(
        str(r) for r, validated in enumerate(validates) if not validated
    )
    raise RuntimeError(
        f"MetricAverage: rank {missing} did no validation in this epoch, others did. "
        "Give every rank a part of the validation data, or none to all."
    )
