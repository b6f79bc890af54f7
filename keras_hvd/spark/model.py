"""KerasModel: a Keras model that predicts the rows of a Spark DataFrame."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import keras
import numpy as np
import pyarrow
import tensorflow as tf
from pyspark import keyword_only
from pyspark.ml.base import Model
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, DoubleType, FloatType, StructField, StructType

from keras_hvd.spark import columns, fitting
from keras_hvd.spark.params import Arguments

_ARGUMENTS = "arguments.json"


class KerasModel(Arguments, Model):
    """A Keras model that predicts the rows of a DataFrame.

    `KerasEstimator.fit` returns it. Each argument has a getter and a setter
    (`getModel`, `setOutputCols`).

    Args:
        model: the Keras model.
        history: the metrics of each epoch, by their names.
        feature_columns: the columns for the model's inputs, in their order.
        label_columns: the columns that its outputs predict.
        output_cols: the columns for its outputs; by default `<label>__output`.
        custom_objects: classes and functions that the model needs, by their names.
        batch_size: rows that it predicts at once.
        output_sizes: how many numbers each output has for a row; by default as the
            model tells.

    Raises:
        TypeError: there is no such argument.

    Example::

        trained = keras_hvd.spark.KerasModel(
            model=keras.saving.load_model("model.keras"),
            feature_columns=["features"],
            label_columns=["label"],
        )
        trained.transform(df).select("label__output")
    """

    @keyword_only
    def __init__(
        self,
        *,
        model: keras.Model | None = None,
        history: Mapping[str, Sequence[float]] | None = None,
        feature_columns: Sequence[str] = (),
        label_columns: Sequence[str] = (),
        output_cols: Sequence[str] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        batch_size: int = 32,
        output_sizes: Sequence[int] | None = None,
    ):
        super().__init__()

    def save(self, path: str | os.PathLike) -> None:
        """Saves it as a new folder, with `model.keras` and a JSON file.

        Args:
            path: the folder, on this host.

        Raises:
            FileExistsError: it is there already.

        Example::

            trained.save("/models/first")
        """
        arguments = self.values()
        model = arguments.pop("model")
        del arguments["custom_objects"]
        Path(path).mkdir(parents=True)
        keras.saving.save_model(model, Path(path, fitting.MODEL))
        Path(path, _ARGUMENTS).write_text(json.dumps(arguments, indent=2))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        custom_objects: Mapping[str, Any] | None = None,
        safe_mode: bool = True,
    ) -> KerasModel:
        """Loads what `save` has saved.

        Args:
            path: the folder.
            custom_objects: classes and functions that the model needs, by their names.
            safe_mode: whether to reject models that contain Python code.

        Returns:
            The model.

        Raises:
            FileNotFoundError: there is none.
            ValueError: Keras cannot load its model.

        Example::

            trained = keras_hvd.spark.KerasModel.load("/models/first")
        """
        arguments = json.loads(Path(path, _ARGUMENTS).read_text())
        model = keras.saving.load_model(
            Path(path, fitting.MODEL), custom_objects, safe_mode=safe_mode
        )
        return cls(model=model, custom_objects=custom_objects, **arguments)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        given = SimpleNamespace(**self.values())
        if given.model is None or not given.feature_columns:
            raise ValueError("KerasModel: give it a model and feature_columns")
        inputs = columns.select(dataset.schema, given.feature_columns, "KerasModel")
        outputs = _outputs(given, dataset.columns)
        saved, objects = fitting.dump_model(given.model), given.custom_objects or {}
        # As bytes, since a worker keeps the model by them.
        made = cloudpickle.dumps((keras.config.floatx(), saved, objects))
        named = [
            each.alias(f"keras_hvd_feature_{place}")
            for place, each in enumerate(inputs)
        ]
        return dataset.select("*", *named).mapInArrow(
            _predicting(made, given.feature_columns, outputs, given.batch_size),
            StructType([*dataset.schema.fields, *outputs]),
        )


def _outputs(given: SimpleNamespace, there: Sequence[str]) -> list[StructField]:
    """The columns that are added to those there."""
    sizes, names = given.output_sizes, given.output_cols
    if sizes is None:
        sizes = [math.prod(each.shape[1:]) for each in given.model.outputs]
    if names is None:
        names = [f"{label}__output" for label in given.label_columns]
    if len(names) != len(sizes) or {*names} & {*there}:
        raise ValueError(
            f"KerasModel: the model has {len(sizes)} outputs, which setOutputCols "
            f"names, as none of the columns {', '.join(there)} is; got {names}"
        )
    number, array = DoubleType(), ArrayType(FloatType(), False)
    return [
        StructField(name, number if size == 1 else array, False)
        for name, size in zip(names, sizes)
    ]


def _predicting(
    made: bytes, features: Sequence[str], outputs: Sequence[StructField], size: int
) -> Callable[[Iterable[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
    """A function for `mapInArrow`, for batches whose last columns are the features."""

    def predict(
        batches: Iterable[pyarrow.RecordBatch],
    ) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            if not len(batch):
                continue
            model, kept = _load(made), batch.columns[: -len(features)]
            values = zip(features, batch.columns[len(kept) :])
            arrays = [columns.to_numpy(*each) for each in values]
            x = columns.as_inputs(arrays, getattr(model, "inputs", None))
            found = keras.tree.flatten(model.predict(x, batch_size=size, verbose=0))
            yield pyarrow.RecordBatch.from_arrays(
                [*kept, *map(_to_arrow, found)],
                [*batch.schema.names[: len(kept)], *(each.name for each in outputs)],
            )

    return predict


def _to_arrow(values: np.ndarray) -> pyarrow.Array:
    flat, size = values.reshape(-1), values[0].size
    if size == 1:
        return pyarrow.array(flat.astype("float64"))
    starts = np.arange(0, flat.size + 1, size).astype("int32")
    return pyarrow.ListArray.from_arrays(starts, flat.astype("float32"))


@functools.lru_cache(maxsize=1)
def _load(made: bytes) -> keras.Model:
    """The model, in a worker of Spark, which has one CPU for its task."""
    # Not by variables: later ranks are children of such workers. TensorFlow may have
    # begun already, for a function of the user's.
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(1)
        # All workers of a host would take the GPUs' memory.
        tf.config.set_visible_devices([], "GPU")
    floatx, saved, objects = cloudpickle.loads(made)
    keras.config.set_floatx(floatx)
    return fitting.load_model(saved, objects, compile=False)
