"""Attributes that have another value for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def temporarily(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute another value in this block; after it, None if it had none.

    Example:

    >>> import types
    >>> light = types.SimpleNamespace(color="red")
    >>> with temporarily(light, "color", "green"):
    ...     print(light.color)
    green
    >>> print(light.color)
    red
    """
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
