"""KerasEstimator: trains a Keras model on a Spark DataFrame."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import cloudpickle
import keras
from pyspark import keyword_only
from pyspark.ml.base import Estimator
from pyspark.sql import DataFrame

from keras_hvd.spark import columns, fitting
from keras_hvd.spark.function import run
from keras_hvd.spark.model import KerasModel
from keras_hvd.spark.params import Arguments


class KerasEstimator(Arguments, Estimator[KerasModel]):
    """Trains a Keras model on a DataFrame, on several ranks.

    Each rank has its part of the rows, in a file of its host. The arguments are
    Horovod's, each with a getter and a setter (`getEpochs`, `setEpochs`). The learning
    rate is as given, for any number of ranks.

    Args:
        num_proc: the number of ranks; by default `spark.default.parallelism`.
        model: a Keras model, or a function that returns one.
        optimizer: a Keras optimizer or its name, unless the model is compiled.
        loss: Keras' loss, or a list with one for each label. Without it, a compiled
            model keeps its own, with its metrics.
        loss_weights: the weight of each loss.
        metrics: Keras' metrics.
        gradient_compression: `compression` of `DistributedOptimizer`.
        backward_passes_per_step: that of `DistributedOptimizer`.
        custom_objects: classes and functions that the model needs, by their names.
        feature_cols: the columns for the model's inputs, in their order. Several
            columns for a model with one input are put side by side.
        label_cols: the column for each output of the model.
        label_shapes: the shape of a batch of each label, such as `[(-1, 28, 28)]`; by
            default that of the output, if it has as many numbers.
        sample_weight_col: the column of the rows' weights.
        validation: the share of rows for validation, which each rank draws; or the
            column that marks them.
        batch_size: rows in each rank's batch.
        val_batch_size: that of validation; by default `batch_size`.
        epochs: the number of epochs.
        train_steps_per_epoch: by default as many as the rank with the fewest rows has.
        validation_steps_per_epoch: by default, each rank validates with all its rows.
        shuffle: whether each rank takes its rows in another order in each epoch.
        transformation_fn: a function that takes each row, a dictionary, and returns it
            changed. It is not called for predictions.
        random_seed: the seed of all random numbers; without it, runs differ.
        callbacks: Keras' callbacks, beside `BroadcastGlobalVariables` and
            `MetricAverage`.
        checkpoint_callback: a `ModelCheckpoint`, whose last model is returned.
        verbose: as that of `fit` in Keras.
        use_gpu: whether ranks see GPUs.
        backend_env: more environment variables of the ranks.
        **without_effect: Horovod's other arguments. A warning names them.

    Raises:
        TypeError: there is no such argument.

    Example::

        estimator = keras_hvd.spark.KerasEstimator(
            num_proc=4,
            model=model,
            optimizer=keras.optimizers.Adam(0.001),
            loss="mse",
            feature_cols=["features"],
            label_cols=["label"],
            epochs=10,
        )
        trained = estimator.fit(df)
        trained.transform(df).select("label__output")
    """

    without_effect = (
        *("backend", "store", "run_id", "data_module", "partitions_per_process"),
        *("train_reader_num_workers", "val_reader_num_workers", "reader_pool_type"),
        *("inmemory_cache_all", "mp_start_method", "shuffle_buffer_size"),
        *("tensorflow_dataset_prefetch_buffer_size", "compress_sparse_cols"),
        *("transformation_edit_fields", "transformation_removed_fields"),
        *("continuous_cols", "categorical_cols"),
    )

    @keyword_only
    def __init__(
        self,
        *,
        num_proc: int | None = None,
        model: keras.Model | Callable[[], keras.Model] | None = None,
        optimizer: keras.optimizers.Optimizer | str | None = None,
        loss: Any = None,
        loss_weights: Sequence[float] | None = None,
        metrics: Sequence[Any] = (),
        gradient_compression: Any = None,
        backward_passes_per_step: int = 1,
        custom_objects: Mapping[str, Any] | None = None,
        feature_cols: Sequence[str] = (),
        label_cols: Sequence[str] = (),
        label_shapes: Sequence[Sequence[int]] | None = None,
        sample_weight_col: str | None = None,
        validation: float | str | None = None,
        batch_size: int = 32,
        val_batch_size: int | None = None,
        epochs: int = 1,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        shuffle: bool = True,
        transformation_fn: Callable[[dict], Mapping[str, Any]] | None = None,
        random_seed: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        checkpoint_callback: keras.callbacks.ModelCheckpoint | None = None,
        verbose: int = 1,
        use_gpu: bool = True,
        backend_env: Mapping[str, str] | None = None,
        **without_effect: Any,
    ):
        super().__init__()

    def _fit(self, dataset: DataFrame) -> KerasModel:
        given = SimpleNamespace(**self.values())
        ignored = [
            each for each in self.without_effect if vars(given).pop(each) is not None
        ]
        _check(given)
        others = [given.sample_weight_col, given.validation]
        names = [*given.feature_cols, *given.label_cols, *others]
        names = [name for name in dict.fromkeys(names) if isinstance(name, str)]
        selected = columns.select(dataset.schema, names, "KerasEstimator")
        if ignored:
            warnings.warn(
                f"KerasEstimator: without effect: {', '.join(ignored)}. Each rank "
                "reads its rows from a file of its host",
                stacklevel=3,
            )
        given.custom_objects = dict(given.custom_objects or {})
        if isinstance(given.model, keras.Model):
            given.model = fitting.dump_model(given.model)
        hidden = {} if given.use_gpu else {"CUDA_VISIBLE_DEVICES": "-1"}
        results = run(
            fitting.train,
            args=(keras.config.floatx(), cloudpickle.dumps(given)),
            num_proc=given.num_proc,
            env={**(given.backend_env or {}), **hidden},
            verbose=int(given.verbose != 0),
            df=dataset.select(*selected),
        )
        saved, history, sizes = results[0]
        named = keras.tree.flatten([given.loss, given.metrics])
        objects = {each.__name__: each for each in named if hasattr(each, "__name__")}
        return KerasModel(
            model=fitting.load_model(saved, {**objects, **given.custom_objects}),
            history=history,
            feature_columns=[*given.feature_cols],
            label_columns=[*given.label_cols],
            custom_objects=given.custom_objects,
            batch_size=given.val_batch_size or given.batch_size,
            output_sizes=sizes,
        )


def _check(given: SimpleNamespace) -> None:
    """Raises ValueError for what is wrong in the arguments by themselves."""
    # A model with one input takes several columns.
    inputs = len(getattr(given.model, "inputs", None) or ())
    outputs = len(getattr(given.model, "outputs", None) or ())
    numbers = (given.num_proc, given.batch_size, given.val_batch_size, given.epochs)
    is_share = not isinstance(given.validation, str)
    wrong = {
        f"model must be a Keras model, or a function that returns one; got "
        f"{given.model!r}": not callable(given.model),
        f"feature_cols must be names of columns, got {given.feature_cols!r}": (
            not given.feature_cols or isinstance(given.feature_cols, str)
        ),
        f"label_cols must be names of columns, got {given.label_cols!r}": (
            not given.label_cols or isinstance(given.label_cols, str)
        ),
        f"the model has {inputs} inputs, got feature_cols={given.feature_cols!r}": (
            inputs > 1 and inputs != len(given.feature_cols)
        ),
        f"the model has {outputs} outputs, got label_cols={given.label_cols!r}": (
            outputs > 0 and outputs != len(given.label_cols)
        ),
        "num_proc, batch_size, val_batch_size and epochs must be 1 or more, got "
        f"{', '.join(map(str, numbers))}": any(
            n is not None and n < 1 for n in numbers
        ),
        f"validation must be a column, or a share below 1; got {given.validation}": (
            is_share and not 0 <= (given.validation or 0) < 1
        ),
        "checkpoint_callback must save whole models (save_weights_only=False)": (
            getattr(given.checkpoint_callback, "save_weights_only", False)
        ),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"KerasEstimator: {text}")
    if isinstance(given.model, keras.Model):
        fitting.check_compiling(given.model, given)
