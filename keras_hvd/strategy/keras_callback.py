"""The callback that `fit` adds under a strategy."""

from __future__ import annotations

from typing import Any

import keras

from keras_hvd.callbacks.broadcast_global_variables import BroadcastGlobalVariables
from keras_hvd.callbacks.coordination import surround


class BroadcastInitialState(BroadcastGlobalVariables):
    """Broadcasts rank 0's initial state, which a callback may have restored there.

    Like every keras_hvd callback it also coordinates `fit`: rank 0 alone prints and
    writes, moving statistics are averaged, and all ranks stop together.
    """


def listed(callbacks: Any) -> list[keras.callbacks.Callback]:
    """The callbacks that `fit` was given, in any form.

    Example:

    >>> listed(None), len(listed(keras.callbacks.Callback()))
    ([], 1)
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks or [])


def coordinated(callbacks: Any, model: keras.Model) -> Any:
    """The callbacks of a `fit` under a strategy, with `BroadcastInitialState` added.

    Example:

    >>> [type(each).__name__ for each in coordinated([], keras.Sequential())]
    ['BroadcastInitialState']
    """
    start = BroadcastInitialState()
    given = listed(callbacks)
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return [start, *given]
    if not any(isinstance(each, BroadcastInitialState) for each in given):
        callbacks.callbacks.insert(0, start)
        keras.callbacks.Callback.set_model(start, model)
        surround(callbacks, model)
        callbacks.set_params(callbacks.params)
    return callbacks
