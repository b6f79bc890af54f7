"""Labels of variables, alike on all ranks whatever other objects each has made.

Keras numbers automatic names (`dense_1`) by the objects that a process has made before.
It begins paths with the layers that build a variable, which `load_model` and
`clone_model` may leave out. Both differ between ranks if one of them makes a further
layer, or loads a model that the others make. The engine compares the rest: see `labels`
in c_api.h.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

from keras.src.backend.common import global_state

from keras_hvd.backends.automatic_names import without_number
from keras_hvd.job import basics

# Of Keras' session: the number of objects by job, process set and unnumbered name.
_Counts: TypeAlias = "collections.Counter[tuple[basics.Epoch, int, str]]"
_COUNTS = "keras_hvd_names"

# By job and process set: each object's number among those of its name.
_places: weakref.WeakKeyDictionary[Any, dict[tuple[basics.Epoch, int], int]] = (
    weakref.WeakKeyDictionary()
)


def name_in_program(named: Any, process_set: int) -> str:
    """A name of an optimizer or a layer for the ranks of a process set.

    It does not depend on what else each rank has made. Two of one program may reduce at
    the same time, so they keep different names: the first to reduce has no number.
    Threads may reduce in another order on each rank, so there the own numbers stay.

    >>> import keras
    >>> optimizers = [keras.optimizers.Nadam() for _ in range(2)]
    >>> [name_in_program(each, 0) for each in (*optimizers, optimizers[0])]
    ['nadam', 'nadam#1', 'nadam']
    """
    if threading.current_thread() is not threading.main_thread():
        return f"{named.name}@thread"
    base = without_number(named.name)
    places = _places.setdefault(named, {})
    epoch, number = key = basics.epoch(), process_set
    if key not in places:
        counts = _counts_of_session()
        places[key] = counts[epoch, number, base]
        counts[epoch, number, base] += 1
    return f"{base}#{places[key]}" if places[key] else base


def place_in_program(named: Any, process_set: int) -> int | None:
    """The number in `name_in_program`, from 0; None if it has no name yet.

    >>> import keras
    >>> place_in_program(keras.optimizers.Nadam(), 0)
    """
    return _places.get(named, {}).get((basics.epoch(), process_set))


def take_place(named: Any, process_set: int, place: int) -> None:
    """Takes the place that the object has on the other ranks, such as before loading.

    >>> import keras
    >>> optimizer = keras.optimizers.Nadam()
    >>> take_place(optimizer, 0, 7)
    >>> name_in_program(optimizer, 0)
    'nadam#7'
    """
    counts, key = _counts_of_session(), (basics.epoch(), process_set)
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
