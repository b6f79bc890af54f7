"""What `fit` needs of callbacks under a strategy, without the user giving any."""

from __future__ import annotations

from typing import Any

import keras

from keras_hvd.callbacks.broadcast_global_variables import BroadcastGlobalVariables
from keras_hvd.callbacks.coordination import surround


class EqualStart(BroadcastGlobalVariables):
    """Gives all ranks what rank 0 starts with: weights may have been restored there.

    With what every callback of keras_hvd does besides: rank 0 alone prints and writes,
    moving statistics are averaged after each epoch, and all ranks stop together.
    """


def coordinated(callbacks: Any, model: keras.Model) -> Any:
    """The callbacks of a `fit` under a strategy.

    Args:
        callbacks: what `fit` was given.
        model: the model.

    Returns:
        What it is to be given.

    Example:

    >>> [type(each).__name__ for each in coordinated([], keras.Sequential())]
    ['EqualStart']
    """
    start = EqualStart()
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return [start, *keras.tree.flatten(callbacks or [])]
    if not any(isinstance(each, EqualStart) for each in callbacks.callbacks):
        callbacks.callbacks.insert(0, start)
        keras.callbacks.Callback.set_model(start, model)
        surround(callbacks, model)
        callbacks.set_params(callbacks.params)
    return callbacks
