"""Automatic names: Keras makes them of classes, and numbers them as they are made."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator

# Of variables without a name, in Keras and in tf.compat.v1.
_UNNAMED = ("variable", "Variable")

# Bidirectional puts these before the names of its two layers.
_DIRECTIONS = re.compile("^(forward|backward)_")

_NUMBERED = re.compile(r"^(.+)_\d+(:\d+)?$")


def without_number(name: str) -> str:
    """A name without the number that Keras has added.

    Names that the user has numbered keep their number, because the user may make such
    layers in any order. Nobody makes an object of a base class, so its name is the
    user's.

    >>> import keras
    >>> [without_number(each) for each in ("dense_1", "adam_2", "forward_lstm_3")]
    ['dense', 'adam', 'forward_lstm']
    >>> without_number("stage_2"), without_number("layer_2")
    ('stage_2', 'layer_2')
    """
    found = _NUMBERED.match(name)
    if found is None or "keras" not in sys.modules:
        return name
    base = found[1]
    return base + (found[2] or "") if _is_automatic(_DIRECTIONS.sub("", base)) else name


@functools.lru_cache(10_000)
def _is_automatic(name: str) -> bool:
    return name in _UNNAMED or name in _names_of_classes()


def _names_of_classes() -> Iterator[str]:
    keras = sys.modules["keras"]
    bases = [keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric]
    classes = list(bases)
    for each in classes:
        if each not in (*bases, keras.Model):
            yield keras.src.utils.naming.to_snake_case(each.__name__)
        classes += each.__subclasses__()
