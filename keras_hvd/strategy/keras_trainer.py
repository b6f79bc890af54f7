"""`fit`, `evaluate`, `predict` and similar methods under a strategy."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.backend.tensorflow import trainer as trainer_module

from keras_hvd.backends.tensorflow import current_strategy
from keras_hvd.backends.tensorflow.collectives.graph_names import name_in_graph
from keras_hvd.backends.tensorflow.collectives.submission import on_cpu
from keras_hvd.callbacks.broadcast_global_variables import BroadcastGlobalVariables
from keras_hvd.callbacks.coordination import surround
from keras_hvd.callbacks.weights import average_statistics
from keras_hvd.callbacks.writers import let_write
from keras_hvd.job import said_once
from keras_hvd.job.process_sets import global_process_set
from keras_hvd.job.temporary import temporarily
from keras_hvd.optimizer.distributed_class import is_distributed
from keras_hvd.optimizer.traced_steps import STANDS_FOR
from keras_hvd.strategy import keras_patches, no_rows, reduction
from keras_hvd.strategy.keras_data import require_same, rows_of_rank
from keras_hvd.strategy.keras_metrics import means_over_ranks
from keras_hvd.strategy.keras_optimizer import require_made_under

# If these differed, ranks would wait for each other in different collectives.
_COMPARED_OF_COMPILE = ("optimizer", "loss", "metrics", "weighted_metrics")
_COMPARED_OF_FIT = (
    "validation_split",
    "validation_freq",
    "validation_steps",
    "epochs",
    "initial_epoch",
)
_SAME_ARGUMENTS = "Call it with the same arguments on every rank."

_NOT_DENSE = tf.RaggedTensorSpec, tf.SparseTensorSpec

# Set on a model whose ranks' moving statistics may differ.
_STATISTICS_DIFFER = "_keras_hvd_statistics_differ"


@keras_patches.replaces(keras.Model, "compile")
def _compile(plain, model, *args, **kwargs):
    strategy = current_strategy.of_model(model)
    if strategy is None:
        return plain(model, *args, **kwargs)
    _require_made_inside(model, "compile")
    if current_strategy.several_ranks(strategy) is not None:
        arguments = _arguments(plain, model, args, kwargs)
        described = {name: _kinds(arguments.get(name)) for name in _COMPARED_OF_COMPILE}
        require_same("compile", described, strategy, remedy=_SAME_ARGUMENTS)
    with strategy.scope():
        plain(model, *args, **kwargs)
    if is_distributed(model.optimizer):
        raise RuntimeError(
            f"model {model.name!r} is compiled under a keras_hvd.Strategy, which sums "
            "gradients itself, with a DistributedOptimizer, which would sum them "
            "again: give it the plain optimizer"
        )
    require_made_under(strategy, model.optimizer)


@keras_patches.replaces(keras.Model, "fit")
def _fit(plain, model, *args, **kwargs):
    strategy = _strategy_of(model, "fit")
    if strategy is None:
        if current_strategy.of_model(model) is not None:
            # A rank alone has no callback of ours that does it.
            given = _arguments(plain, model, args, kwargs).get("callbacks")
            let_write(_listed(given), True)
        return plain(model, *args, **kwargs)
    arguments = _arguments(plain, model, args, kwargs)
    given = {name: arguments.get(name) is not None for name in ("validation_data", "y")}
    described = given | {name: arguments.get(name) for name in _COMPARED_OF_FIT}
    require_same("fit", described, strategy, remedy=_SAME_ARGUMENTS)
    arguments["callbacks"] = _coordinated(arguments.get("callbacks"), model)
    vars(model).pop(_STATISTICS_DIFFER, None)
    return plain(**arguments)


class BroadcastInitialState(BroadcastGlobalVariables):
    """Broadcasts rank 0's initial state, which a callback may have restored there.

    Like every keras_hvd callback it also coordinates `fit`: rank 0 alone prints and
    writes, moving statistics are averaged, and all ranks stop together.

    Example:

    >>> [type(each).__name__ for each in _coordinated([], keras.Sequential())]
    ['BroadcastInitialState']
    """


def _coordinated(callbacks: Any, model: keras.Model) -> Any:
    """The callbacks of a `fit`, with `BroadcastInitialState` added."""
    start = BroadcastInitialState()
    given = _listed(callbacks)
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return [start, *given]
    if not any(isinstance(each, BroadcastInitialState) for each in given):
        callbacks.callbacks.insert(0, start)
        keras.callbacks.Callback.set_model(start, model)
        surround(callbacks, model)
        callbacks.set_params(callbacks.params)
    return callbacks


def _listed(callbacks: Any) -> list[keras.callbacks.Callback]:
    """The callbacks that `fit` was given, in any form."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks or [])


def _quietly(method, plain, model, *args, **kwargs):
    """Calls a method in which only rank 0 shows its progress."""
    strategy = _strategy_of(model, method)
    if strategy is None:
        return plain(model, *args, **kwargs)
    _average_statistics(model)
    arguments = _arguments(plain, model, args, kwargs)
    if said_once.hides():
        arguments["verbose"] = 0
    return plain(**arguments)


# By name: other tools may have replaced the methods by functions of other names.
for _method in ("evaluate", "predict"):
    keras_patches.replaces(keras.Model, _method)(functools.partial(_quietly, _method))


@keras_patches.replaces(keras.Model, "train_on_batch")
def _train_on_batch(plain, model, *args, **kwargs):
    result = _on_rows("train_on_batch", plain, model, *args, **kwargs)
    vars(model)[_STATISTICS_DIFFER] = True
    return result


def _on_rows(method, plain, model, *args, **kwargs):
    """Calls a method of one batch with this rank's rows of it."""
    strategy = _strategy_of(model, method)
    if strategy is None:
        return plain(model, *args, **kwargs)
    arguments = _arguments(plain, model, args, kwargs)
    names = [name for name in ("x", "y", "sample_weight") if name in arguments]
    batch = keras.tree.map_structure(
        _text_as_tensor, {name: arguments[name] for name in names}
    )
    # A training batch may be augmented differently on each rank.
    same = "y" if "y" in batch else "x"
    rows, has_rows = rows_of_rank(batch, same, strategy, method)
    if method != "train_on_batch":
        _average_statistics(model)
    if method != "predict_on_batch":
        # Symbols for any number of rows: this rank may have none.
        symbols = keras.tree.map_structure(_symbol, batch)
        model._maybe_symbolic_build(data_batch=(*symbols.values(), None, None)[:3])
    with _marked(model, method.removesuffix("_on_batch"), has_rows):
        return plain(**{**arguments, **rows})


for _method in ("test_on_batch", "predict_on_batch"):
    keras_patches.replaces(keras.Model, _method)(functools.partial(_on_rows, _method))


def _marked(
    model: Any, kind: str, has_rows: bool | None
) -> contextlib.AbstractContextManager[None]:
    """Tells a model's function whether the batches that it gets are this rank's."""
    getattr(model, f"make_{kind}_function")()
    name = f"{kind}_function"
    function = getattr(model, name)
    own = None if has_rows is None else np.zeros(int(has_rows), "uint8")

    def marked(data):
        # Keras passes a list or a generator.
        return function([no_rows.Rows(each, own) for each in data])

    setattr(marked, STANDS_FOR, function)
    return temporarily(model, name, marked)


@keras_patches.replaces(keras.Model, "_maybe_symbolic_build")
def _maybe_symbolic_build(plain, model, iterator=None, data_batch=None):
    strategy = current_strategy.of_model(model)
    if strategy is None:
        return plain(model, iterator=iterator, data_batch=data_batch)
    build = functools.partial(_build, plain, model, strategy, iterator, data_batch)
    if not _has_own_step(model):
        return build()
    if type(model).call is not keras.Model.call:
        # The step may call the model differently, or take data that Keras cannot
        # unpack. Then the step builds it, as without a strategy.
        with contextlib.suppress(RuntimeError, ValueError):
            build()
    return None


def _has_own_step(model: keras.Model) -> bool:
    """Whether the model has a custom training or test step."""
    plain = keras.Model
    own = type(model)
    return (own.train_step, own.test_step) != (plain.train_step, plain.test_step)


def _build(plain, model, strategy, iterator, data_batch):
    if iterator is None:
        plain(model, data_batch=data_batch)
        return
    # Keras would consume a batch, which a generator gives only once.
    batch = iterator.element_spec
    specs = [each for each in tf.nest.flatten(batch) if not _is_missing(each)]
    if any(isinstance(each, _NOT_DENSE) or each.shape.rank is None for each in specs):
        with strategy.scope():
            _build_by_trace(model, batch)
    else:
        plain(model, data_batch=tf.nest.map_structure(_symbol, batch))


def _build_by_trace(model: keras.Model, batch: Any) -> None:
    """Creates all variables of a training without Keras' symbols, which are dense."""

    @tf.function(autograph=False)
    def call(batch):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        y_pred = model(x, training=False)
        if model._compile_metrics is not None:
            model.compute_metrics(x, y, y_pred, sample_weight=weights)
        if model._compile_loss is not None:
            model._compute_loss(x, y, y_pred, sample_weight=weights, training=False)

    specs = tf.nest.map_structure(
        lambda each: None if _is_missing(each) else each, batch
    )
    compute_output_spec(lambda: call.get_concrete_function(specs) and None)
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    model._post_build()


def _symbol(given: Any) -> keras.KerasTensor | None:
    """A symbol for an array or a spec, with any number of rows."""
    if given is None or _is_missing(given):
        return None
    dtype = keras.backend.standardize_dtype(given.dtype)
    return keras.KerasTensor((None, *given.shape[1:]), dtype)


def _text_as_tensor(array: Any) -> Any:
    """Converts strings to TensorFlow's: Keras has no symbols for arrays of them."""
    kind = getattr(getattr(array, "dtype", None), "kind", None)
    return tf.convert_to_tensor(array) if kind in ("O", "S", "U") else array


def _is_missing(spec: Any) -> bool:
    """Whether the spec stands for a None from a generator."""
    return isinstance(spec, tf.OptionalSpec)


@keras_patches.replaces(trainer_module, "reduce_per_replica")
def _reduce_per_replica(plain, values, strategy, reduction):
    if not current_strategy.is_ours(strategy):
        return plain(values, strategy, reduction)
    has_rows = None
    if isinstance(values, no_rows.Outputs):
        values, has_rows = values
    if current_strategy.several_ranks(strategy) is None:
        return values
    if reduction == "concat":
        return _of_all_ranks(values, strategy, has_rows)
    return means_over_ranks(values, strategy, has_rows)


def _of_all_ranks(outputs: Any, strategy: Any, has_rows: tf.Tensor | None) -> Any:
    """All ranks' rows of a prediction, in the order of ranks."""
    process_set = strategy.extended.process_set
    flat = keras.tree.flatten(outputs)
    if has_rows is not None:
        flat = [_rows_if(has_rows, each) for each in flat]
    parts = [_dense_parts(each, process_set) for each in flat]
    name = name_in_graph("Strategy/predictions")
    all_parts = [part for each in parts for part in each]
    gathered = iter(reduction.all_gather(all_parts, 0, process_set, name))
    joined = [
        _joined(each, [next(gathered) for _ in of_each])
        for each, of_each in zip(flat, parts, strict=True)
    ]
    return keras.tree.pack_sequence_as(outputs, joined)


def _rows_if(has_rows: tf.Tensor, value: Any) -> Any:
    """A rank's rows of a prediction; none if they are not its own."""
    if isinstance(value, tf.RaggedTensor):
        return value[: tf.where(has_rows, value.nrows(), 0)]
    if isinstance(value, tf.SparseTensor):
        shape = value.dense_shape
        kept = tf.concat([tf.where(has_rows, shape[:1], 0), shape[1:]], 0)
        return tf.sparse.slice(value, tf.zeros_like(shape), kept)
    value = tf.convert_to_tensor(value)
    return no_rows.trimmed(value if value.shape.rank else value[None], has_rows)


def _dense_parts(value: Any, process_set: Any) -> list[tf.Tensor]:
    """Dense tensors for a value; all ranks' rows of them make up the whole value."""
    if isinstance(value, tf.RaggedTensor):
        return [value.flat_values, *value.nested_row_lengths()]
    if isinstance(value, tf.SparseTensor):
        rows = value.dense_shape[:1]
        name = name_in_graph("Strategy/predictions/rows")
        with on_cpu():
            [of_ranks] = reduction.all_gather([rows], 0, process_set, name)
        before = tf.reduce_sum(of_ranks[: process_set.rank()])
        offset = tf.concat([[before], tf.zeros_like(value.dense_shape[1:])], 0)
        return [value.indices + offset, value.values, value.dense_shape[None]]
    tensor = tf.convert_to_tensor(value)
    return [tensor if tensor.shape.rank else tensor[None]]


def _joined(value: Any, parts: list[tf.Tensor]) -> Any:
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensor.from_nested_row_lengths(
            parts[0], parts[1:], validate=False
        )
    if isinstance(value, tf.SparseTensor):
        indices, values, shapes = parts
        rows = tf.reduce_sum(shapes[:, :1], 0)
        columns = tf.reduce_max(shapes[:, 1:], 0)
        return tf.SparseTensor(indices, values, tf.concat([rows, columns], 0))
    return parts[0]


def _strategy_of(model: Any, method: str) -> Any:
    """The strategy of a model, if it has several ranks; raises if they cannot train."""
    strategy = current_strategy.of_model(model)
    if strategy is None:
        return None
    _require_made_inside(model, method)
    if method in ("fit", "train_on_batch"):
        _require_built_inside(model, strategy, method)
    if current_strategy.several_ranks(strategy) is None:
        return None
    if strategy.extended.process_set.size() != global_process_set.size():
        raise NotImplementedError(
            f"{method}() works under a keras_hvd.Strategy of all ranks; this one is of "
            f"{strategy.extended.process_set}"
        )
    return strategy


def _require_made_inside(model: Any, method: str) -> None:
    if model._distribute_strategy is None:
        raise RuntimeError(
            f"model {model.name!r} was created outside the scope of the "
            f"keras_hvd.Strategy in which {method}() is called: create it inside "
            "`with strategy.scope():`"
        )


def _require_built_inside(model: Any, strategy: Any, method: str) -> None:
    for variable in model.trainable_variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise RuntimeError(
                f"model {model.name!r}: {variable.path!r} was created outside the "
                f"scope of the keras_hvd.Strategy under which {method}() trains it: "
                "build the model, or give it an input shape, inside "
                "`with strategy.scope():`"
            )


def _kinds(value: Any) -> str:
    """The types of optimizers, losses or metrics, without their numbered names."""

    def kind(each):
        if each is None or isinstance(each, str):
            return each
        named = each if callable(each) and hasattr(each, "__name__") else type(each)
        return named.__name__

    return str(keras.tree.map_structure(kind, value))


def _average_statistics(model: Any) -> None:
    """Averages the statistics after `train_on_batch`, before results depend on them."""
    if vars(model).pop(_STATISTICS_DIFFER, False):
        average_statistics(model)


def _arguments(plain: Callable, model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name."""
    bound = _signature(plain).bind(model, *args, **kwargs).arguments
    return bound | bound.pop("kwargs", {})


_signature = functools.cache(inspect.signature)
