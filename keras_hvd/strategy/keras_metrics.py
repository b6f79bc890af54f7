"""Metrics under a strategy: results are computed from sums over the ranks.

The ranks' variables are added up in each step, for its logs, after an epoch, and where
a loop by hand asks for a result. Reading the variables is never a collective.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope

from keras_hvd.backends.reduce_op import Average, Sum
from keras_hvd.backends.tensorflow import current_strategy
from keras_hvd.backends.tensorflow.collectives.allreduce import grouped_allreduce
from keras_hvd.backends.tensorflow.collectives.graph_names import name_in_graph
from keras_hvd.backends.tensorflow.collectives.submission import on_cpu
from keras_hvd.job.temporary import temporarily
from keras_hvd.strategy import keras_patches, no_rows
from keras_hvd.strategy.reduction import of_ranks_with_rows

# Set on a result that is over all ranks.
_OVER_RANKS = "_keras_hvd_over_ranks"

# Set on a rank's result: the metric, and the place among its results.
_RESULT_OF = "_keras_hvd_result_of"

# Set on a metric: the strategy in whose replicas it is updated.
_UPDATED_UNDER = "_keras_hvd_updated_under"

_here = threading.local()


def means_over_ranks(
    logs: Any, strategy: Any, has_rows: tf.Tensor | None = None
) -> Any:
    """The logs of a step, with the ranks' means of floats that are not from metrics.

    `has_rows` tells whether this rank counts; None if all do.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> logs = means_over_ranks({"own": tf.constant(1.5)}, keras_hvd.Strategy())
    >>> logs["own"].numpy().item()
    1.5
    """
    flat = keras.tree.flatten(_tensors(logs))
    own = {
        i: no_rows.zero_unless(has_rows, each)
        for i, each in enumerate(flat)
        if tf.is_tensor(each) and each.dtype.is_floating
        if not hasattr(each, _OVER_RANKS)
    }
    if own:
        ranks, name = strategy.extended.process_set, name_in_graph("Strategy/logs")
        means = grouped_allreduce(
            [*own.values()], op=Average, name=name, process_set=ranks
        )
        if has_rows is not None:
            means = of_ranks_with_rows(means, has_rows, ranks, f"{name}/ranks")
        for i, mean in zip(own, means, strict=True):
            flat[i] = mean
    return keras.tree.pack_sequence_as(logs, flat)


@keras_patches.replaces(keras.Metric, "__init__")
def _init(plain, metric, *args, **kwargs):
    plain(metric, *args, **kwargs)
    for name, replacement in ("result", _result), ("update_state", _update_state):
        defines = next(each for each in type(metric).__mro__ if name in vars(each))
        _replace_once(defines, name, replacement)


@functools.cache
def _replace_once(kind: type, name: str, replacement: Callable[..., Any]) -> None:
    keras_patches.replace(kind, name, replacement)


def _update_state(plain, metric, *args, **kwargs):
    strategy = current_strategy.several_ranks(current_strategy.of_replica())
    if strategy is not None:
        # A metric that is updated outside of replicas has the same values on each rank.
        vars(metric)[_UPDATED_UNDER] = strategy
    return plain(metric, *args, **kwargs)


def _result(plain, metric, *args, **kwargs):
    strategy = vars(metric).get(_UPDATED_UNDER)
    in_replica = current_strategy.of_replica() is not None
    if strategy is None or in_replica or in_stateless_scope():
        results = plain(metric, *args, **kwargs)
        if strategy is not None and in_replica:
            for place, each in enumerate(keras.tree.flatten(results)):
                if isinstance(each, (tf.Tensor, keras.Variable)):
                    setattr(each, _RESULT_OF, (metric, place))
        return results
    compute = functools.partial(plain, metric, *args, **kwargs)
    return _of_sums(compute, [metric], strategy, f"{metric.name}.result()")


@keras_patches.replaces(keras.Model, "get_metrics_result")
def _get_metrics_result(plain, model):
    strategy = getattr(_here, "strategy", None) or current_strategy.of_replica()
    if current_strategy.several_ranks(strategy) is None:
        return plain(model)
    results = _of_sums(lambda: plain(model), model.metrics, strategy)
    for each in keras.tree.flatten(results):
        if tf.is_tensor(each):
            setattr(each, _OVER_RANKS, True)
    return results


@keras_patches.replaces(keras.Model, "_make_function")
def _make_function(plain, model, step_function):
    strategy = current_strategy.several_ranks(current_strategy.of_model(model))
    if strategy is None:
        return plain(model, step_function)

    @functools.wraps(step_function)
    def step(data):
        if type(model).train_step is keras.Model.train_step:
            no_rows.losses_leave_out()
        return _replaced(step_function(data), model.metrics, strategy)

    return plain(model, step)


def _replaced(logs: Any, metrics: list[keras.Metric], strategy: Any) -> Any:
    """The logs of a custom step, with its metrics' results over all ranks."""
    if not isinstance(logs, dict):
        return logs
    sources = _sources(logs, metrics)
    logs = _tensors(logs)
    chosen = [*dict.fromkeys(metric for metric, _ in sources.values())]
    if not chosen:
        return logs

    def results() -> list[list[Any]]:
        return [keras.tree.flatten(each.result()) for each in chosen]

    here, over_ranks = _tensors(results()), _of_sums(results, chosen, strategy)
    flat = keras.tree.flatten(logs)
    for i, (metric, place) in sources.items():
        of_metric = chosen.index(metric)
        if place < len(here[of_metric]):
            # A log of the same name may not be the metric's result.
            is_result = flat[i] == here[of_metric][place]
            is_result = tf.reduce_all(is_result | (flat[i] != flat[i]))
            flat[i] = tf.where(is_result, over_ranks[of_metric][place], flat[i])
    return keras.tree.pack_sequence_as(logs, flat)


def _sources(
    logs: dict[str, Any], metrics: list[keras.Metric]
) -> dict[int, tuple[keras.Metric, int]]:
    """The metric and place of each log that is a result; a metric may have several.

    A log is known by its value, or else by the metric's name.
    """
    named = {each.name: each for each in metrics}
    seen: collections.Counter[str] = collections.Counter()
    sources = {}
    for i, (path, value) in enumerate(keras.tree.flatten_with_path(logs)):
        name = path[0]
        source = getattr(value, _RESULT_OF, None)
        if source is None and name in named:
            source = named[name], seen[name]
        seen[name] += 1
        if source is not None and not hasattr(value, _OVER_RANKS):
            sources[i] = source
    return sources


def _of_sums(
    compute: Callable[[], Any], metrics: list[Any], strategy: Any, name: str = "metrics"
) -> Any:
    """Computes with the sums over the ranks in place of metrics' variables."""
    variables = [each for metric in metrics for each in metric.variables]
    if not variables:
        return _tensors(compute())
    # In a step, the host would wait for the GPU; outside a step, the host needs them.
    with on_cpu() if tf.executing_eagerly() else contextlib.nullcontext():
        sums = grouped_allreduce(
            [tf.convert_to_tensor(each) for each in variables],
            op=Sum,
            name=name_in_graph(f"Strategy/{name}"),
            process_set=strategy.extended.process_set,
        )
        with keras.StatelessScope(zip(variables, sums, strict=True)):
            return _tensors(compute())


def _tensors(results: Any) -> Any:
    """The results, with variables replaced by their present values."""

    def value(each):
        is_variable = isinstance(each, (keras.Variable, tf.Variable))
        return tf.convert_to_tensor(each) if is_variable else each

    return keras.tree.map_structure(value, results)


@keras_patches.replaces(keras.Model, "_get_metrics_result_or_logs")
def _get_metrics_result_or_logs(plain, model, logs):
    """Replaces results by those over a strategy's ranks, outside its steps."""
    strategy = current_strategy.several_ranks(current_strategy.of_model(model))
    with temporarily(_here, "strategy", strategy):
        return plain(model, logs)
