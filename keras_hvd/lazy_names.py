"""Names that need a library, imported when first used: not all users have it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_hvd.backends import current


def importer(
    package: str,
    defined_in: Mapping[str, str],
    libraries: Sequence[str] = (),
    advice: Callable[[], str] = str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__` (PEP 562).

    `defined_in` has the module of each name, `libraries` what they import beside
    keras_hvd, and `advice` how to get that.

    Example:

    >>> get, names = importer("json", {"JSONDecoder": "decoder"})
    >>> get("JSONDecoder").__name__
    'JSONDecoder'
    >>> "JSONDecoder" in names()
    True
    >>> get("Decoder")
    Traceback (most recent call last):
    AttributeError: module 'json' has no attribute 'Decoder'
    """

    def get(name: str) -> Any:
        if name not in defined_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            public = f"{package.removeprefix('keras_hvd.')}.{name}"
            module = current.module_of(public, f"{package}.{defined_in[name]}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in libraries:
                raise
            raise ImportError(
                f"{package}.{name}: there is no {error.name}: {advice()}"
            ) from error
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *defined_in})

    return get, names
