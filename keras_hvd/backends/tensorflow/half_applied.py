"""Which variables may be of a step that was applied in part.

A step that fails may have updated some variables and others not. So when a job has
failed, all its variables are suspect until they get a value from elsewhere: from a
file, from another rank whose values are whole, or from the script. Values that an
optimizer computes from them do not count.

Nothing here costs anything before a failure: TensorFlow numbers variables as they are
made, and only then are assignments noted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops.resource_variable_ops import (
    BaseResourceVariable,
    ResourceVariable,
)

from keras_hvd.job import basics, native
from keras_hvd.job.temporary import temporarily


class _Failure:
    """The failure of the last job that failed, and its variables since then."""

    def __init__(self) -> None:
        self.text = ""
        self.epoch: basics.Epoch | None = None
        # Variables with a lower number existed then.
        self.before = 0
        self.assigned: set[str] = set()
        # These came later, with the value of a variable that is suspect on another
        # rank.
        self.received: set[str] = set()

    def clear(self) -> None:
        self.before = 0
        self.assigned.clear()
        self.received.clear()


_failure = _Failure()
_thread = threading.local()


def note_failure() -> None:
    """Makes all variables suspect if this process' job has failed, once for each job.

    Example:

    >>> note_failure()
    >>> is_suspect(tf.Variable(1.0))
    False
    """
    text = native.engine().khvd_failure().decode(errors="replace")
    if not text or _failure.epoch == basics.epoch():
        return
    _failure.clear()
    _failure.text, _failure.epoch, _failure.before = text, basics.epoch(), ops.uid()
    _watch_assignments()


def is_suspect(variable: Any) -> bool:
    """Whether a variable may have a value of a step that was applied in part."""
    if not any_suspect():
        return False
    name = _name(variable)
    if name in _failure.assigned:
        return False
    return name in _failure.received or _number(name) < _failure.before


def receive(variables: Sequence[Any], suspect: Iterable[bool]) -> None:
    """Notes that variables have got another rank's values, suspect there or not."""
    for variable, is_there in zip(variables, suspect, strict=True):
        if is_there:
            _failure.received.add(_name(variable))
            _failure.assigned.discard(_name(variable))
        elif is_suspect(variable):
            _assign(_name(variable))


def trust_all() -> None:
    """Treats all variables as whole."""
    _failure.clear()


def why_suspect(variables: Iterable[Any]) -> str:
    """Says which of these variables are suspect, and why; or "".

    Example:

    >>> why_suspect([tf.Variable(1.0)])
    ''
    """
    paths = [getattr(v, "path", None) or v.name for v in variables if is_suspect(v)]
    if not paths:
        return ""
    shown = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
    origin = _failure.text or "a rank that sent these values was in a job that failed"
    return (
        f"{origin}. The step may have been applied in part, and {len(paths)} "
        f"variable(s) have the values of then ({shown})"
    )


def any_suspect() -> bool:
    """Whether there may be suspect variables at all."""
    return bool(_failure.before or _failure.received)


def _name(variable: Any) -> str:
    """TensorFlow's name of a variable, which no other ever has in this process."""
    if not isinstance(variable, tf.Variable):
        # Keras' own variable.
        variable = getattr(variable, "_value", variable)
    return getattr(variable, "_unique_id", None) or str(id(variable))


def _number(name: str) -> int:
    """The number at the end of a name: later variables have higher ones."""
    number = name.rpartition("_")[2]
    return int(number) if number.isdecimal() else 0


def _assign(name: str) -> None:
    _failure.assigned.add(name)
    _failure.received.discard(name)


@functools.cache
def _watch_assignments() -> None:
    """Notes from now on which variables get values not computed from their own."""
    # Variables that a function makes are of the base class alone. TensorFlow has set
    # some methods of the other to wrappers of its.
    for owner in (BaseResourceVariable, ResourceVariable):
        # The second is for TensorFlow's checkpoints.
        for name in vars(owner).keys() & {"assign", "_restore_from_tensors"}:
            _after(owner, name)
    # Not before: scripts without Keras would import it for nothing.
    import keras

    _except_within(keras.optimizers.Optimizer, "apply")
    # An addition to a suspect value does not make it whole.
    _except_within(keras.Variable, "assign_add")
    _except_within(keras.Variable, "assign_sub")


def _after(owner: Any, name: str) -> None:
    plain: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(plain)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        if tf.executing_eagerly() and not getattr(_thread, "derives", False):
            _assign(_name(self))
        return result

    setattr(owner, name, noting)


def _except_within(owner: Any, name: str) -> None:
    plain: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(plain)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with temporarily(_thread, "derives", True):
            return plain(self, *args, **kwargs)

    setattr(owner, name, marked)
