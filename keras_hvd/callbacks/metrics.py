"""Metrics over the data of all ranks.

A metric's variables (sums, counts, histograms) add up over ranks; its results (means,
ratios, areas) do not. So the variables are summed, and results computed from the sums.
"""

from __future__ import annotations

import numbers
from typing import Any

import keras
import numpy as np

from keras_hvd.backends.current import framework
from keras_hvd.backends.reduce_op import Sum
from keras_hvd.job.objects import allgather_object
from keras_hvd.job.process_sets import ProcessSet, global_process_set

Results = dict[str, Any]


def results_over_ranks(
    model: keras.Model, process_set: ProcessSet = global_process_set
) -> Results:
    """The metrics of a compiled model over all ranks' data: a result for each name.

    The metrics' variables keep this rank's values.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")])
    >>> model.compile(loss="mse", metrics=["mae"])
    >>> _ = model.evaluate(np.ones((4, 1)), np.full((4, 1), 3.0), verbose=0)
    >>> results_over_ranks(model)
    {'loss': 9.0, 'mae': 3.0}
    """
    variables = [each for metric in model.metrics for each in metric.variables]
    if not variables:
        return {}
    with framework.on_cpu():
        sums = framework.grouped_allreduce(
            variables, op=Sum, name="keras_hvd/metrics", process_set=process_set
        )
        with keras.StatelessScope(state_mapping=list(zip(variables, sums))):
            return _flat(model.get_metrics_result())


def means_over_ranks(
    logs: Results, process_set: ProcessSet = global_process_set
) -> Results:
    """Each log's mean over the ranks that have it, if it is a number there.

    For logs that are not metrics, such as those of a custom `train_step`.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> means_over_ranks({"loss": np.float32(1.5), "name": "no number"})
    {'loss': 1.5}
    """
    of_ranks = allgather_object(logs, name="keras_hvd/logs", process_set=process_set)
    means = {}
    for name in logs:
        values = [each[name] for each in of_ranks if name in each]
        # Includes NumPy's scalars, but not arrays.
        if all(isinstance(value, numbers.Real) for value in values):
            means[name] = float(np.mean(values))
    return means


def _flat(results: Results) -> Results:
    flat = {}
    for name, value in results.items():
        if isinstance(value, dict):
            flat.update(_flat(value))
            continue
        array = np.asarray(value)
        flat[name] = float(array) if array.ndim == 0 else array
    return flat
