"""A rehearsal: a rank that is new traces its steps while it is alone.

Otherwise the others would wait for that in its first step. What it traces is right in a
job of any size, since the job may change.
"""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_hvd.backends.automatic_names import without_number
from keras_hvd.backends.global_generator import global_generator
from keras_hvd.backends.labels import place_in_program, take_place
from keras_hvd.callbacks.broadcast_global_variables import named_in_program
from keras_hvd.optimizer.retracing import keep_traces


class _OneStep(keras.callbacks.Callback):
    """Ends an epoch after a step of training, and one of validation.

    Keras batches arrays in another way if it is told the number of steps.
    """

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True

    def on_test_batch_end(self, batch, logs=None):
        self.model.stop_evaluating = True


def rehearse(
    model: keras.Model,
    undo: Callable[[], object],
    arguments_of_fit: Callable[[], dict[str, Any]],
) -> None:
    """Makes a step of a model's `fit`, and calls `undo`, which takes it back.

    Its callbacks see nothing of it. A generator is left alone, because its batch would
    be lost.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    >>> state = keras_hvd.elastic.KerasState(model)
    >>> rehearse(model, state.restore, lambda: {"x": np.ones((2, 1)), "y": np.ones(2)})
    >>> int(model.optimizer.iterations)
    0
    """
    name_alike(model)
    own = {"epochs": 1, "initial_epoch": 0, "validation_freq": 1, "verbose": 0}
    with _random_numbers_kept():
        arguments = {**arguments_of_fit(), **own, "callbacks": [_OneStep()]}
        validation = arguments.get("validation_data")
        if isinstance(arguments["x"], Iterator) or isinstance(validation, Iterator):
            return
        try:
            model.fit(**arguments)
        finally:
            undo()


def name_alike(model: keras.Model) -> None:
    """Gives a model's collectives names that are the same in each job.

    Traces keep them. Otherwise they would depend on what else a job's ranks have made.
    """
    counts: collections.Counter[tuple[int, str]] = collections.Counter()
    for named, process_set in named_in_program(model):
        key = process_set, without_number(named.name)
        place, counts[key] = counts[key], counts[key] + 1
        if place_in_program(named, process_set) not in (None, place):
            # What was traced with another name.
            model.train_function = None
        take_place(named, process_set, place)
    keep_traces(model)


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Lets the generators that scripts draw from go on as they would have."""
    of_keras = global_generator().state
    state = of_keras.numpy()
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        of_keras.assign(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
