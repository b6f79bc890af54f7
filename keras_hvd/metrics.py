"""Metrics over the data of all ranks.

A metric's variables (sums, counts, histograms) add up over ranks, its results (means,
ratios, areas) do not. So variables are summed, and results computed from the sums.
"""

from __future__ import annotations

import numbers
from typing import Any

import keras
import numpy as np

from keras_hvd.collectives.allreduce import grouped_allreduce
from keras_hvd.collectives.allreduce_op import Sum
from keras_hvd.collectives.submission import on_cpu
from keras_hvd.objects import allgather_object
from keras_hvd.runtime.process_sets import ProcessSet, global_process_set

Results = dict[str, Any]


def results_over_ranks(
    model: keras.Model, process_set: ProcessSet = global_process_set
) -> Results:
    """What the model's metrics would show had one process seen all ranks' data.

    Args:
        model: a compiled model; its metrics' variables are left as they are.
        process_set: the ranks whose data count.

    Returns:
        A result for each metric's name, the same on all ranks.

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
    with on_cpu():
        sums = grouped_allreduce(
            variables, op=Sum, name="keras_hvd/metrics", process_set=process_set
        )
        with keras.StatelessScope(state_mapping=list(zip(variables, sums))):
            return _flat(model.get_metrics_result())


def means_over_ranks(
    logs: Results, process_set: ProcessSet = global_process_set
) -> Results:
    """Plain means of what is no metric, such as the logs of a custom `train_step`.

    Args:
        logs: values by name.
        process_set: the ranks whose logs count.

    Returns:
        For each name the mean over those ranks that have it as a number.

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
        # NumPy's scalars among them, but not arrays.
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
