"""Replaces parts of Keras for a `keras_hvd.Strategy`.

Methods of Keras' classes are replaced once, when the first strategy is made. Each
replacement behaves like the plain method, unless our strategy is in force.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

_noted: list[tuple[Any, str, Callable[..., Any]]] = []


def replaces(owner: Any, *names: str) -> Callable[[Callable], Callable]:
    """Registers the decorated function as a replacement, to be made by `install`."""

    def note(replacement: Callable) -> Callable:
        _noted.extend((owner, name, replacement) for name in names)
        return replacement

    return note


def install() -> None:
    """Makes Keras behave as a `keras_hvd.Strategy` needs."""
    for each in _noted:
        replace(*each)


def replace(owner: Any, name: str, replacement: Any) -> None:
    """Replaces a function of a module, or a method in the class that defines it.

    The replacement gets the plain function, and then the arguments. Raises RuntimeError
    if this version of Keras has no function of that name.

    Example:

    >>> class Greeter:
    ...     def greet(self, name):
    ...         return f"hello {name}"
    >>> replace(Greeter, "greet", lambda plain, *args: plain(*args).upper())
    >>> Greeter().greet("you")
    'HELLO YOU'
    """
    for place in owner.__mro__ if isinstance(owner, type) else [owner]:
        if name in vars(place):
            break
    else:
        raise RuntimeError(
            f"keras_hvd: Keras {keras.__version__} has no "
            f"{owner.__name__}.{name}, which it has to change: use another version of "
            "Keras"
        )
    plain = vars(place)[name]

    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        return replacement(plain, *args, **kwargs)

    setattr(place, name, function)
