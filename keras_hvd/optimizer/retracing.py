"""Makes Keras trace a model's functions anew after the job has changed."""

from __future__ import annotations

from typing import Any

import keras

from keras_hvd.job import basics, process_sets

_FUNCTIONS = ("train_function", "test_function", "predict_function")
_TRACED_FOR = "_keras_hvd_traced_for"


def trace_anew_in_another_job(model: keras.Model) -> None:
    """Drops a model's functions if they were traced for another place in a job.

    Otherwise their steps would fail. Keras makes them anew when it needs them.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> trace_anew_in_another_job(model)
    >>> model.make_train_function()
    >>> trace_anew_in_another_job(model)
    >>> model.train_function is None
    False
    """
    place = _place()
    # If this is the process' only job, functions without a record were traced in it.
    unknown = place if basics.epoch().number == 1 else None
    if vars(model).get(_TRACED_FOR, unknown) != place:
        for function in _FUNCTIONS:
            setattr(model, function, None)
    vars(model)[_TRACED_FOR] = place


def _place() -> tuple[Any, ...]:
    """All that a trace may hold of the job."""
    # No number of a process set is given again in another job.
    sets_of = basics.epoch() if process_sets.job_has_sets() else None
    return basics.rank(), basics.size(), sets_of
