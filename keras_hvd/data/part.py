"""part: each rank gets its rows of arrays that all ranks hold."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_hvd.data.place import place_in
from keras_hvd.job.objects import allgather_object
from keras_hvd.job.process_sets import ProcessSet, global_process_set

# The checksum of arrays that are not contiguous in memory copies this many bytes at
# once.
_COPIED_AT_ONCE = 2**26


def part(
    *data: Any,
    drop_remainder: bool = True,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives each rank its rows of arrays: every n-th one, on n ranks.

    Every rank calls it with all rows. The ranks compare checksums of them. If they hold
    other rows, or the same ones in another order, as after `train_test_split` without
    `random_state`, some rows would be in the training of one rank and the validation of
    another. That is an error on every rank.

    Args:
        *data: data with rows: NumPy arrays, tensors, DataFrames and Series of pandas,
            sparse matrices of SciPy; or lists, tuples and dicts of them. All have the
            same number of rows. None stays None.
        drop_remainder: whether all ranks get as many rows, as training needs. If not,
            some get one more, and the ranks have all rows together.
        process_set: the ranks that share the rows; by default all of them.

    Returns:
        This rank's rows, in the structure that was given; with several arguments, one
        for each. With one rank it is the data itself.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: there is no data.
        ValueError: the ranks' data differ; something has no rows, or another number of
            them, or fewer than there are ranks; the process set is not part of the job,
            or does not contain this rank.

    Example:

    >>> import keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> x, y = keras_hvd.data.part(np.ones((6, 2)), np.arange(6))
    >>> x.shape, y.shape
    ((6, 2), (6,))
    """
    if not data:
        raise TypeError("part takes data: x, y = keras_hvd.data.part(x, y)")
    size, place = place_in(process_set, "part")
    settings = {"drop_remainder": drop_remainder}
    count = agreed_rows("part", data, settings, process_set)
    if size == 1:
        return data[0] if len(data) == 1 else data
    if count < size:
        raise ValueError(f"part: {count} rows are too few for {size} ranks")
    end = count // size * size if drop_remainder else count
    rows = slice(place, end, size)
    parts = keras.tree.map_structure(lambda each: _rows(each, rows), data)
    return parts[0] if len(data) == 1 else parts


def agreed_rows(
    function: str,
    data: tuple[Any, ...],
    settings: dict[str, Any],
    process_set: ProcessSet,
) -> int:
    """The number of rows; raises, on every rank, if ranks have other ones or settings.

    `function` is the public caller's name.

    Example:

    >>> import keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> agreed_rows("part", (np.ones((6, 2)),), {}, keras_hvd.global_process_set)
    6
    """
    mine = _described(data, settings, compared=process_set.size() > 1)
    of_ranks = allgather_object(
        mine, name=f"keras_hvd/{function}", process_set=process_set
    )
    _require_alike(function, of_ranks, [*settings, "rows"], process_set)
    return mine["rows"]


def _described(
    data: tuple[Any, ...], settings: dict[str, Any], compared: bool
) -> dict[str, Any]:
    """The facts that ranks compare. Errors are among them, so that no rank waits."""
    described: dict[str, Any] = {"error": "", **settings}
    try:
        leaves = [
            (".".join(map(str, path)), leaf)
            for path, leaf in keras.tree.flatten_with_path(data)
            if leaf is not None
        ]
        described["rows"] = _count(leaves)
        if compared:
            described["digests"] = {path: digest(leaf) for path, leaf in leaves}
    except Exception as error:
        described["error"] = f"{type(error).__name__}: {error}"
    return described


def _count(leaves: list[tuple[str, Any]]) -> int:
    """The number of rows, which is the same in all leaves."""
    counts = {path: _length(path, leaf) for path, leaf in leaves}
    if len({*counts.values()}) != 1:
        raise ValueError(f"the data have different numbers of rows: {counts or 'none'}")
    return next(iter(counts.values()))


def _length(path: str, leaf: Any) -> int:
    shape = getattr(leaf, "shape", None)
    if _is_of_tensorflow(leaf, "SparseTensor") or shape is None or len(shape) == 0:
        raise ValueError(
            f"argument {path} is a {type(leaf).__name__}, which has no rows to take: "
            "give it as an array, or use keras_hvd.data.distribute with a "
            "tf.data.Dataset"
        )
    return int(shape[0])


def _rows(leaf: Any, rows: slice) -> Any:
    if leaf is None:
        return None
    if hasattr(leaf, "iloc"):
        return leaf.iloc[rows]
    return leaf.tocsr()[rows] if hasattr(leaf, "tocsr") else leaf[rows]


def _require_alike(
    function: str,
    of_ranks: list[dict[str, Any]],
    numbers: list[str],
    process_set: ProcessSet,
) -> None:
    """Raises, on every rank, if one rank failed or the ranks differ."""
    first, root = of_ranks[0], process_set.ranks[0]
    remedy = _REMEDY.format(function=function)
    for rank, each in zip(process_set.ranks, of_ranks, strict=True):
        if each["error"]:
            raise ValueError(f"{function}: on rank {rank}: {each['error']}")
        for what in numbers:
            if each[what] != first[what]:
                raise ValueError(
                    f"{function}: {what} is {first[what]} on rank {root}, and "
                    f"{each[what]} on rank {rank}. {remedy}"
                )
        here, there = first.get("digests", {}), each.get("digests", {})
        differing = [path for path in here if there.get(path) != here[path]]
        if here.keys() != there.keys() or differing:
            raise ValueError(
                f"{function}: rank {rank} holds other rows than rank {root}, or has "
                "them in another order (argument "
                f"{', '.join(differing) or 'names'}). {remedy}"
            )


_REMEDY = (
    "The ranks share the rows by their places, so all must hold the same ones in the "
    "same order: split and shuffle with one seed on all ranks "
    "(train_test_split(..., random_state=0)), read files in sorted order, and leave "
    "out {function}() for data that are this rank's own already"
)


def digest(leaf: Any) -> int:
    """A checksum of something with rows, the same in all processes."""
    crc = 0
    for array in _arrays(leaf):
        crc = zlib.crc32(f"{array.shape} {array.dtype}".encode(), crc)
        if array.dtype.hasobject or array.dtype.kind == "T":
            crc = _digest_of_objects(array.reshape(-1).tolist(), crc)
        elif array.nbytes:
            for rows in _in_memory(array):
                crc = zlib.crc32(rows.view(np.uint8).data, crc)
    return crc


def _arrays(leaf: Any) -> Iterator[np.ndarray]:
    """The arrays that hold all elements of something with rows."""
    if _is_of_tensorflow(leaf, "RaggedTensor"):
        yield leaf.flat_values.numpy()
        yield from (each.numpy() for each in leaf.nested_row_splits)
    elif hasattr(leaf, "columns"):
        yield np.array([str(name) for name in leaf.columns])
        for place in range(len(leaf.columns)):
            yield leaf.iloc[:, place].to_numpy()
    elif hasattr(leaf, "tocsr"):
        matrix = leaf.tocsr()
        yield from (matrix.data, matrix.indices, matrix.indptr)
    elif hasattr(leaf, "to_numpy"):
        yield leaf.to_numpy()
    else:
        yield np.asarray(leaf)


def _is_of_tensorflow(leaf: Any, kind: str) -> bool:
    """Whether something is of a class of TensorFlow, which may not be here."""
    tensorflow = sys.modules.get("tensorflow")
    return hasattr(tensorflow, kind) and isinstance(leaf, getattr(tensorflow, kind))


def _in_memory(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array's elements as vectors of memory, with few of them copied at once."""
    if array.flags.c_contiguous:
        yield array.reshape(-1)
        return
    of_row = max(1, array.nbytes // len(array))
    step = max(1, _COPIED_AT_ONCE // of_row)
    for start in range(0, len(array), step):
        yield np.ascontiguousarray(array[start : start + step]).reshape(-1)


def _digest_of_objects(objects: Any, crc: int) -> int:
    """A checksum of objects by their `repr`, in their order."""
    for each in objects:
        if isinstance(each, (list, tuple)):
            crc = _digest_of_objects(each, zlib.crc32(f"[{len(each)}".encode(), crc))
        elif isinstance(each, np.ndarray):
            crc = zlib.crc32(str(digest(each)).encode(), crc)
        elif isinstance(each, (str, bytes)):
            text = each if isinstance(each, bytes) else each.encode(errors="replace")
            crc = zlib.crc32(text + b"\0", crc)
        else:
            says: Any = type(each).__repr__
            # The default `repr` depends on the object's place in memory.
            word = type(each).__name__ if says is object.__repr__ else repr(each)
            crc = zlib.crc32(word.encode(errors="replace"), crc)
    return crc
