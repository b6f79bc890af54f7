"""Keeps reductions out of what torch.compile compiles: they run as they are.

Dynamo, its tracer, takes an object's methods from the object's `__class__`, which of a
distributed optimizer is the plain class. It would compile Keras' own `apply`, which
reduces nothing. What comes before the class, also for Dynamo, are attributes of the
object itself.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch


class _Thread(threading.local):
    # Whether the update that runs belongs to a compiled step.
    compiles = False


_thread = _Thread()


def install() -> None:
    """Does nothing: a compiled step calls what an optimizer has at the time.

    Example:

    >>> install()
    """


def note_change(optimizer: Any) -> None:
    """Makes a compiled step call the methods that an optimizer's class adds or changes.

    They run as they are, but for Keras' own update of the variables, which is compiled.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD())
    >>> note_change(optimizer)
    >>> "apply" in vars(optimizer)
    True
    """
    kinds = type(optimizer).__mro__
    for kind in kinds[: kinds.index(optimizer.__class__)]:
        for name, value in vars(kind).items():
            if isinstance(value, types.FunctionType) and not name.startswith("__"):
                method = getattr(type(optimizer), name).__get__(optimizer)
                vars(optimizer)[name] = left_out(method)
    vars(optimizer)["apply"] = _noting_who_calls(optimizer.apply)
    update = type(optimizer)._backend_update_step.__get__(optimizer)
    vars(optimizer)["_backend_update_step"] = _compiled_where_noted(update)


def left_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that compiled steps call as it is.

    >>> left_out(len)([1, 2])
    2
    """
    return torch.compiler.disable(function)


def _noting_who_calls(apply: Callable[..., None]) -> Callable[..., None]:
    @left_out
    def apply_in_compiled_step(*arguments: Any) -> None:
        outer, _thread.compiles = _thread.compiles, True
        try:
            apply(*arguments)
        finally:
            _thread.compiles = outer

    @functools.wraps(apply)
    def dispatching(grads: Any, trainable_variables: Any = None) -> None:
        if torch.compiler.is_compiling():
            apply_in_compiled_step(grads, trainable_variables)
        else:
            apply(grads, trainable_variables)

    return dispatching


def _compiled_where_noted(update: Callable[..., None]) -> Callable[..., None]:
    compiled = torch.compile(update)

    @functools.wraps(update)
    def dispatching(*arguments: Any) -> None:
        (compiled if _thread.compiles else update)(*arguments)

    return dispatching
