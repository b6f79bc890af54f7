"""evaluate: exact metrics of a model over the data of all ranks."""

from __future__ import annotations

from typing import Any

import keras

from keras_hvd.callbacks.metric_average import MetricAverage
from keras_hvd.job import arrival


def evaluate(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    *,
    verbose: str | int = "auto",
    callbacks: list[keras.callbacks.Callback] | None = None,
    return_dict: bool = False,
    **kwargs: Any,
) -> Any:
    """Evaluates a model on the data of all ranks, each rank on its own part.

    All ranks get the results of one process on all the data, even if the parts differ
    in size, and also for metrics that are not means (AUC, precision). Every rank must
    call it.

    Args:
        model: a compiled model.
        x: this rank's part of the input, as for `model.evaluate`.
        y: this rank's part of the targets.
        verbose: as for `model.evaluate`; ranks other than 0 are silent.
        callbacks: as for `model.evaluate`.
        return_dict: whether to return a dict instead of a list.
        **kwargs: passed to `model.evaluate`.

    Returns:
        The result of `model.evaluate`.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.

    Example:

    >>> import keras, keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> model = keras.Sequential([keras.layers.Identity()])
    >>> model.compile(loss="mae")
    >>> keras_hvd.evaluate(model, np.ones((4, 1)), np.full((4, 1), 2.5), verbose=0)
    1.5
    """
    arrival.require_arrived("evaluate")
    metrics = MetricAverage()
    logs = model.evaluate(
        x,
        y,
        verbose=verbose,
        callbacks=[metrics, *(callbacks or [])],
        return_dict=True,
        **kwargs,
    )
    logs.update(metrics.evaluated)
    return logs if return_dict else model._flatten_metrics_in_order(logs)
