"""All ranks stop in the same step when one has set `stop_training`.

A rank that stopped alone would leave the others waiting for its gradients. To agree
within a step, the hosts have to meet in each step. They do it only if they can see that
a callback may stop there. Where one might do so unseen, each rank takes the answer of
the step before, which is there already.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import inspect
import types
from collections.abc import Iterable
from typing import Any

import keras

from keras_hvd.callbacks.writers import SILENT_WRITERS, WRITERS, callbacks_in, held_by
from keras_hvd.job import basics
from keras_hvd.job.host_allreduce import HostAllreduce

# Callbacks of Keras that never ask to stop in the middle of an epoch.
_QUIET_IN_BATCHES = {
    *WRITERS,
    *SILENT_WRITERS,
    keras.callbacks.Callback,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
}

_BATCH_HOOKS = (
    "on_batch_begin",
    "on_batch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
)

_WORD = "stop_training"

# The attributes in which Python keeps a callable's inner function.
_INNER = {
    types.MethodType: ("__func__",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    functools.partial: ("func",),
    functools.cached_property: ("func",),
}


class When(enum.IntEnum):
    """When ranks agree to stop, besides at the end of an epoch."""

    NEVER = 0
    A_STEP_LATER = 1
    AT_ONCE = 2


class Stopping:
    """The agreement of all ranks, in one training."""

    def __init__(self) -> None:
        self._when = When.NEVER
        self._free = [AnyRank("stop_training"), AnyRank("stop_training")]
        self._asked: AnyRank | None = None
        self._is_known = False  # why training stops

    def begin(self, of_ranks: Iterable[When]) -> None:
        """Takes the needs of each rank's callbacks."""
        self._when = max(of_ranks)

    def after_batch(self, model: keras.Model) -> None:
        """Sets the model's `stop_training` on all ranks or on none."""
        if self._when is When.AT_ONCE:
            self.agree(model)
        if self._when is not When.A_STEP_LATER:
            return
        wanted = bool(model.stop_training)
        asked = self._free.pop()
        asked.begin(wanted)
        stop = self._answer()
        self._asked = asked
        # Not this rank's own wish: the others hear of that in their next step.
        if stop != wanted:
            model.stop_training = stop
        self._explain(wanted, stop)

    def agree(self, model: keras.Model) -> None:
        """The same, but waits for all ranks."""
        wanted = bool(model.stop_training)
        wished = self._answer() or wanted
        stop = model.stop_training = self._free[-1](wished)
        self._explain(wanted, stop)

    def end(self) -> None:
        """Leaves no question under way."""
        self._answer()

    def _explain(self, wanted: bool, stop: bool) -> None:
        """Rank 0 says why it stops, if not by a wish of its own callbacks."""
        self._is_known = self._is_known or wanted
        if not stop or self._is_known or basics.rank() != 0:
            return
        self._is_known = True
        print(
            "\nTraining stops because another rank has set model.stop_training: its "
            "callbacks' words are shown with KERAS_HVD_ALL_OUTPUT=1.",
            flush=True,
        )

    def _answer(self) -> bool:
        """The answer to the last question."""
        if self._asked is None:
            return False
        asked, self._asked = self._asked, None
        answer = asked.finish()
        self._free.append(asked)
        return answer


class AnyRank:
    """Whether any rank says yes; a question on the host that all ranks have to ask.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> AnyRank("ready")(True)
    True
    """

    # Of a training that has failed, some may be under way for ever.
    _under_way: set[AnyRank] = set()

    def __init__(self, name: str):
        self._number = (ctypes.c_float * 1)()
        # A sum: a rank that has ended its epoch gives zeros, but not for a maximum.
        self._sum = HostAllreduce(
            f"keras_hvd/{name}", ctypes.addressof(self._number), 4
        )

    def __call__(self, mine: bool) -> bool:
        self.begin(mine)
        return self.finish()

    def begin(self, mine: bool) -> None:
        """Asks, and waits for no rank."""
        self._number[0] = mine
        self._sum.begin()
        self._under_way.add(self)

    def finish(self) -> bool:
        """Waits for the answer."""
        try:
            self._sum.finish()
        finally:
            self._under_way.discard(self)
        return self._number[0] > 0


def needs(callbacks: Iterable[keras.callbacks.Callback]) -> When:
    """Returns when the ranks must agree, as far as these callbacks of one rank show.

    Example:

    >>> class Stop(keras.callbacks.Callback):
    ...     def on_train_batch_end(self, batch, logs=None):
    ...         self.model.stop_training = batch == 3
    >>> needs([Stop()]).name, needs([keras.callbacks.EarlyStopping()]).name
    ('AT_ONCE', 'NEVER')
    >>> needs([keras.callbacks.LambdaCallback(on_train_batch_end=print)]).name
    'AT_ONCE'
    >>> show = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, l: print(b))
    >>> needs([show]).name
    'A_STEP_LATER'
    """
    return _needed_by(callbacks, set())


def _needed_by(callbacks: Iterable[keras.callbacks.Callback], met: set[int]) -> When:
    needed = When.NEVER
    for callback in callbacks:
        # Callbacks may hold each other.
        if id(callback) in met:
            continue
        met.add(id(callback))
        inner = _needed_by(callbacks_in(callback), met)
        needed = max(needed, inner, _needed_within_batches(callback))
    return needed


def _needed_within_batches(callback: keras.callbacks.Callback) -> When:
    if type(callback) in _QUIET_IN_BATCHES:
        return When.NEVER
    hooks = [
        getattr(callback, name)
        for name in _BATCH_HOOKS
        if not _is_default(callback, name)
    ]
    if not hooks:
        return When.NEVER
    own = [
        value
        for kind in type(callback).__mro__
        if kind not in keras.callbacks.Callback.__mro__
        for value in vars(kind).values()
    ]
    seen: set[int] = set()
    # A hook that cannot be read may do anything.
    unseen = not all(map(_is_readable, hooks))
    if unseen or any(_mentions(each, seen) for each in [*own, *held_by(callback)]):
        return When.AT_ONCE
    return When.A_STEP_LATER


def _is_default(callback: keras.callbacks.Callback, hook: str) -> bool:
    method = getattr(callback, hook)
    return getattr(method, "__func__", None) is getattr(keras.callbacks.Callback, hook)


def _is_readable(found: Any) -> bool:
    return isinstance(found, types.FunctionType) or any(
        _is_readable(each) for each in _inner(found)
    )


def _inner(found: Any) -> list[Any]:
    names = _INNER.get(type(found))
    if names is not None:
        return [getattr(found, name) for name in names]
    call = inspect.getattr_static(type(found), "__call__", None)
    return [call] if isinstance(call, types.FunctionType) else []


def _mentions(found: Any, seen: set[int], called: int = 0) -> bool:
    """Whether code speaks of `stop_training`, or functions that it holds or names."""
    if id(found) in seen:
        return False
    seen.add(id(found))
    if not isinstance(found, types.FunctionType):
        return any(_mentions(each, seen, called) for each in _inner(found))
    names = _names_in(found.__code__)
    if _WORD in names:
        return True
    held = [_content(cell) for cell in found.__closure__ or ()]
    if any(_mentions(each, seen, called) for each in held):
        return True
    # Functions of a module, but not all functions that these call in turn.
    named = [found.__globals__.get(name) for name in names] if called == 0 else []
    return any(
        _mentions(each, seen, called + 1)
        for each in named
        if isinstance(each, types.FunctionType)
    )


def _names_in(code: types.CodeType) -> set[str]:
    """The names and strings in code and in its inner functions."""
    names = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return names


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
