"""Makes Keras trace a model's functions anew where another job needs other ones.

Under `elastic.fit` a trace that holds nothing of its job is kept: a rank that joins, or
goes on with fewer, need not trace its steps while the others wait.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from keras_hvd.job import basics, later_jobs, process_sets

_FUNCTIONS = ("train_function", "test_function", "predict_function")
_TRACED_FOR = "_keras_hvd_traced_for"
_KEEPS = "_keras_hvd_keeps_traces"

# An attribute of a function: the names of the numbers that its traces hold.
_HELD = "_keras_hvd_held"

_QUANTITIES = (
    basics.rank,
    basics.size,
    basics.local_rank,
    basics.local_size,
    basics.cross_rank,
    basics.cross_size,
)


@functools.cache
def install() -> None:
    """Makes the functions of all models note what their traces hold of a job.

    Example:

    >>> install()
    """
    # Keras has it on TensorFlow alone, where functions are traced.
    plain = getattr(keras.Model, "_make_function", None)
    if plain is None:
        return

    @functools.wraps(plain)
    def make_function(model, step_function):
        held: set[str] = set()

        @functools.wraps(step_function)
        def step(data):
            with later_jobs.noting(held):
                return step_function(data)

        function = plain(model, step)
        setattr(function, _HELD, held)
        return function

    keras.Model._make_function = make_function


def copy_held(function: Any, stand_in: Any) -> None:
    """Makes a stand-in for a function tell what the function's traces hold."""
    setattr(stand_in, _HELD, getattr(function, _HELD, None))


def trace_anew_in_another_job(model: keras.Model) -> None:
    """Drops a model's functions whose traces hold what this job has otherwise.

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
    here = _place()
    # If this is the process' only job, functions without a record were traced in it.
    unknown = here if basics.epoch().number == 1 else None
    before = vars(model).get(_TRACED_FOR, unknown)
    vars(model)[_TRACED_FOR] = here
    if before == here:
        return
    keeps = vars(model).get(_KEEPS, False)
    for name in _FUNCTIONS:
        held = getattr(getattr(model, name), _HELD, None)
        if (
            before is None
            or held is None
            or _differ({*held, "sets"} if keeps else {*here}, before, here)
        ):
            setattr(model, name, None)


def keep_traces(model: keras.Model) -> None:
    """Keeps a model's functions in later jobs, as far as they hold nothing of one.

    For models whose collectives have the same names in each job, and whose steps
    nothing changes in between.

    >>> import keras_hvd
    >>> keep_traces(keras.Sequential([keras.layers.Dense(1)]))
    """
    vars(model)[_KEEPS] = True


def _differ(held: set[str], before: dict[str, Any], here: dict[str, Any]) -> bool:
    return any(each not in here or before[each] != here[each] for each in held)


def _place() -> dict[str, Any]:
    """All that a trace may hold of the job."""
    place: dict[str, Any] = {each.__name__: each() for each in _QUANTITIES}
    # No number of a process set is given again in another job.
    place["sets"] = basics.epoch() if process_sets.job_has_sets() else None
    return place
