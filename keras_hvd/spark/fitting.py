"""What each rank does for a KerasEstimator: it trains on its rows of the DataFrame."""

from __future__ import annotations

import math
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pyarrow
import tensorflow as tf

from keras_hvd.backends.compression import NoneCompressor
from keras_hvd.callbacks.broadcast_global_variables import BroadcastGlobalVariables
from keras_hvd.callbacks.metric_average import MetricAverage
from keras_hvd.data.even import even
from keras_hvd.job import basics
from keras_hvd.optimizer.distributed_optimizer import DistributedOptimizer
from keras_hvd.spark import columns
from keras_hvd.spark.rank import rows
from keras_hvd.world.initialization import init

MODEL = "model.keras"


def dump_model(model: keras.Model) -> bytes:
    """A model as the bytes of its `.keras` file."""
    with tempfile.TemporaryDirectory() as folder:
        keras.saving.save_model(model, Path(folder, MODEL))
        return Path(folder, MODEL).read_bytes()


def load_model(saved: bytes, objects: Mapping[str, Any], **options: Any) -> keras.Model:
    """The model of `dump_model`, with the custom objects that it needs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, MODEL)
        path.write_bytes(saved)
        # The user's own program made it, and sends functions beside it.
        options["safe_mode"] = False
        return keras.saving.load_model(path, custom_objects=objects, **options)


def check_compiling(model: keras.Model, given: SimpleNamespace) -> None:
    """Raises ValueError unless there are a loss and one optimizer."""
    if given.loss is None and (given.metrics or given.loss_weights):
        raise ValueError("KerasEstimator: metrics and loss_weights go with a loss")
    if not model.compiled and None in (given.loss, given.optimizer):
        raise ValueError(
            "KerasEstimator: give a loss and an optimizer, or a compiled model; got "
            f"loss={given.loss!r} and optimizer={given.optimizer!r}"
        )
    if model.compiled and given.optimizer is not None:
        raise ValueError(
            f"KerasEstimator: the model is compiled with {model.optimizer!r}, and "
            f"there is another optimizer, {given.optimizer!r}: give one of them"
        )


def train(floatx: str, made: bytes) -> tuple[bytes, dict[str, list[float]], list[int]]:
    """Trains, as a rank; returns the model, its history and its outputs' sizes.

    `made` is pickled, since optimizers make variables: the estimator's arguments.
    """
    init()
    keras.config.set_floatx(floatx)
    given = pickle.loads(made)
    if given.random_seed is not None:
        keras.utils.set_random_seed(given.random_seed)
    with (
        keras.saving.custom_object_scope(given.custom_objects),
        tempfile.TemporaryDirectory() as folder,
    ):
        model = _compiled(given)
        batches = _Batches(given, model, rows())
        kept = Path(folder, MODEL)
        history = _fit(given, model, batches, str(kept))
        if basics.rank() != 0:
            return b"", {}, []
        outputs = model.predict_on_batch(batches.make(batches.training[:1])[0])
        sizes = [each[0].size for each in keras.tree.flatten(outputs)]
        saved = kept.read_bytes() if kept.exists() else dump_model(model)
    return saved, history, sizes


def _compiled(given: SimpleNamespace) -> keras.Model:
    if callable(given.model):
        model = given.model()
        check_compiling(model, given)
    else:
        model = load_model(given.model, given.custom_objects)
    optimizer = DistributedOptimizer(
        keras.optimizers.get(given.optimizer or model.optimizer),
        compression=given.gradient_compression or NoneCompressor,
        backward_passes_per_step=given.backward_passes_per_step,
    )
    if given.loss is not None:
        metrics = given.metrics or None
        model.compile(optimizer, given.loss, given.loss_weights, metrics)
    return model


def _fit(
    given: SimpleNamespace, model: keras.Model, batches: _Batches, path: str
) -> dict[str, list[float]]:
    """Trains a model, with its checkpoints at `path`; returns the history."""
    callbacks = [BroadcastGlobalVariables(0), MetricAverage(), *given.callbacks]
    if given.checkpoint_callback is not None:
        given.checkpoint_callback.filepath = path
        callbacks.append(given.checkpoint_callback)
    steps = given.train_steps_per_epoch
    dataset = batches.dataset(batches.training, given.batch_size, given.shuffle)
    validation = None
    if given.validation:
        size = given.val_batch_size or given.batch_size
        validation = batches.dataset(batches.validation, size)
    history = model.fit(
        even(dataset, "repeat" if steps else "drop", steps=steps),
        epochs=given.epochs,
        shuffle=False,
        validation_data=validation,
        validation_steps=given.validation_steps_per_epoch,
        callbacks=callbacks,
        verbose=given.verbose,
    )
    return {name: np.array(each).tolist() for name, each in history.history.items()}


class _Batches:
    """Makes batches of a rank's rows, in a model's shapes; raises if there are none."""

    def __init__(
        self, given: SimpleNamespace, model: keras.Model, table: pyarrow.Table
    ):
        self._given = given
        self._inputs = getattr(model, "inputs", None)
        self._outputs = getattr(model, "outputs", None)
        self._columns = {
            name: columns.Rows(name, table[name]) for name in table.column_names
        }
        seed, rank = given.random_seed, basics.rank()
        self._random = np.random.default_rng(None if seed is None else [seed, rank])
        numbers, is_kept = np.arange(len(table)), np.zeros(len(table), bool)
        if isinstance(given.validation, str):
            is_kept = self._columns[given.validation].take(numbers).astype(bool)
        elif given.validation:
            count = round(given.validation * len(table))
            is_kept[self._random.permutation(numbers)[:count]] = True
        self.training, self.validation = numbers[~is_kept], numbers[is_kept]
        if not len(self.training) or (given.validation and not len(self.validation)):
            raise ValueError(
                f"KerasEstimator: rank {rank} has {len(self.training)} rows for "
                f"training and {len(self.validation)} for validation: it needs more "
                "data, or a smaller num_proc"
            )

    def make(self, numbers: np.ndarray) -> tuple[Any, ...]:
        """The batch of the rows of these numbers, as `fit` takes it."""
        given = self._given
        found = {name: column.take(numbers) for name, column in self._columns.items()}
        if given.transformation_fn is not None:
            found = _transformed(found, given.transformation_fn)
        features = [found[name] for name in given.feature_cols]
        labels = [found[name] for name in given.label_cols]
        y = tuple(self._label(place, each) for place, each in enumerate(labels))
        batch = columns.as_inputs(features, self._inputs), y if len(y) > 1 else y[0]
        if given.sample_weight_col is None:
            return batch
        return *batch, found[given.sample_weight_col].astype(keras.config.floatx())

    def _label(self, place: int, values: np.ndarray) -> np.ndarray:
        if self._given.label_shapes:
            shape = self._given.label_shapes[place]
            return columns.in_shape(values, shape, f"label {place}")
        shape = self._outputs[place].shape if self._outputs else (None, None)
        if None not in shape[1:] and values[0].size == math.prod(shape[1:]):
            return values.reshape(len(values), *shape[1:])
        return columns.as_rows(values)

    def dataset(
        self, numbers: np.ndarray, size: int, shuffle: bool = False
    ) -> tf.data.Dataset:
        """Batches of the rows of these numbers, each epoch in another order."""

        def batches() -> Iterator[tuple[Any, ...]]:
            order = self._random.permutation(numbers) if shuffle else numbers
            for start in range(0, len(order), size):
                yield self.make(order[start : start + size])

        signature = tf.nest.map_structure(
            lambda each: tf.TensorSpec((None, *each.shape[1:]), each.dtype),
            self.make(numbers[:1]),
        )
        dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
        steps = tf.data.experimental.assert_cardinality(math.ceil(len(numbers) / size))
        return dataset.apply(steps).prefetch(tf.data.AUTOTUNE)


def _transformed(
    found: Mapping[str, np.ndarray], change: Callable[[dict], Mapping[str, Any]]
) -> dict[str, np.ndarray]:
    """Columns of which a function has changed each row."""
    changed = [change(dict(zip(found, row))) for row in zip(*found.values())]
    return {name: np.stack([row[name] for row in changed]) for name in changed[0]}
