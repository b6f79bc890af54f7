"""What ranks have to agree on about variables, whatever else each of them has made.

Keras numbers automatic names (`dense_1`) by what a process has made before, and begins
paths with the layers that build a variable, which `load_model` and `clone_model` may
leave out. Both differ between ranks if one of them makes a further layer, or loads a
model that the others make. The engine compares the rest: see `labels` in c_api.h.
"""

from __future__ import annotations

import collections
import functools
import re
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import keras
from keras.src.backend.common import global_state

from keras_hvd.runtime import basics

# Of variables without a name, in Keras and in tf.compat.v1.
_UNNAMED = ("variable", "Variable")

# Bidirectional puts these before the names of its two layers.
_DIRECTIONS = re.compile("^(forward|backward)_")

_NUMBERED = re.compile(r"^(.+)_\d+(:\d+)?$")

_automatic_names: set[str] = set()

# Of Keras' session: by job, process set and name without number, how many have it.
_Counts: TypeAlias = "collections.Counter[tuple[str, int, str]]"
_COUNTS = "keras_hvd_names"

# By job and process set: each one's number among those of its name.
_places: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], int]] = (
    weakref.WeakKeyDictionary()
)


def name_in_program(named: Any, process_set: int) -> str:
    """A name of an optimizer or a layer for the ranks of a process set.

    It does not depend on what else each rank has made. Two of one program may reduce at
    the same time, so they keep different names: the first to reduce has no number.
    Threads may reduce in another order on each rank, so there the own numbers stay.

    >>> optimizers = [keras.optimizers.Nadam() for _ in range(2)]
    >>> [name_in_program(each, 0) for each in (*optimizers, optimizers[0])]
    ['nadam', 'nadam#1', 'nadam']
    """
    if threading.current_thread() is not threading.main_thread():
        return f"{named.name}@thread"
    base = without_number(named.name)
    places = _places.setdefault(named, {})
    job, number = key = basics.job(), process_set
    if key not in places:
        counts = _counts_of_session()
        places[key] = counts[job, number, base]
        counts[job, number, base] += 1
    return f"{base}#{places[key]}" if places[key] else base


def place_in_program(named: Any, process_set: int) -> int | None:
    """The number in `name_in_program`, from 0; None if it has no name yet.

    >>> place_in_program(keras.optimizers.Nadam(), 0)
    """
    return _places.get(named, {}).get((basics.job(), process_set))


def take_place(named: Any, process_set: int, place: int) -> None:
    """Takes the place of what the other ranks have there, such as before it was loaded.

    >>> optimizer = keras.optimizers.Nadam()
    >>> take_place(optimizer, 0, 7)
    >>> name_in_program(optimizer, 0)
    'nadam#7'
    """
    counts, key = _counts_of_session(), (basics.job(), process_set)
    of_name = *key, without_number(named.name)
    _places.setdefault(named, {})[key] = place
    counts[of_name] = max(counts[of_name], place + 1)


def _counts_of_session() -> _Counts:
    """Begins anew with `keras.utils.clear_session()`, as Keras' own numbers do."""
    return global_state.get_global_attribute(
        _COUNTS, default=collections.Counter(), set_to_default=True
    )


def own_name(path: str) -> str:
    """The last part of a path, without an automatic number.

    >>> own_name("sequential/sync_batch_normalization_1")
    'sync_batch_normalization'
    """
    return without_number(path.rpartition("/")[2])


@functools.lru_cache(10_000)
def without_number(name: str) -> str:
    """A name without the number that Keras has added; other numbers stay.

    >>> without_number("dense_1"), without_number("adam_2"), without_number("block_1")
    ('dense', 'adam', 'block_1')
    """
    found = _NUMBERED.match(name)
    if found is None:
        return name
    base = found[1]
    return base + (found[2] or "") if _is_automatic(_DIRECTIONS.sub("", base)) else name


def labels_of(paths: Sequence[str]) -> list[str]:
    """Variables' paths without numbers of automatic names and their model's own name.

    >>> labels_of(["sequential_1/dense_2/kernel", "sequential_1/dense_3/kernel"])
    ['dense/kernel', 'dense/kernel']
    >>> labels_of(["dense_2/kernel", "dense_2/bias"])
    ['dense/kernel', 'dense/bias']
    """
    parts = [path.split("/") for path in paths]
    if _begin_with_model(parts):
        parts = [each[1:] for each in parts]
    return ["/".join(map(without_number, each)) for each in parts]


def are_alike(label: str, other: str) -> bool:
    """Whether two labels can be of one variable; one may lack the other's first parts.

    >>> are_alike("dense/kernel", "encoder/dense/kernel")
    True
    >>> are_alike("decoder/dense/kernel", "encoder/dense/kernel")
    False
    """
    return f"/{label}".endswith(f"/{other}") or f"/{other}".endswith(f"/{label}")


def _begin_with_model(paths: Sequence[Sequence[str]]) -> bool:
    """Whether one name encloses all the variables, and layers of some of them."""
    return (
        len({path[0] for path in paths}) == 1
        and min(map(len, paths)) > 1
        and max(map(len, paths)) > 2
    )


def _is_automatic(name: str) -> bool:
    """Whether Keras gives this name to something unnamed: that of its class."""
    if name not in _automatic_names:
        bases = keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric
        _automatic_names.update(_UNNAMED, *map(_names_of_classes, bases))
    return name in _automatic_names


def _names_of_classes(base: type) -> Iterable[str]:
    yield _in_snake_case(base.__name__)
    subclasses: list[type] = base.__subclasses__()
    for each in subclasses:
        yield from _names_of_classes(each)


def _in_snake_case(name: str) -> str:
    """As Keras' `auto_name` does it.

    >>> _in_snake_case("Conv2DTranspose"), _in_snake_case("RMSprop")
    ('conv2d_transpose', 'rm_sprop')
    """
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
