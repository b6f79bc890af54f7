"""Python objects between ranks, pickled, over the engine's C API.

No TensorFlow op takes part, so these work anywhere: eagerly, while a graph is traced,
and before TensorFlow is imported.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import numpy as np

from keras_hvd import basics, native

# khvd_dtype and khvd_kind in tf_ops/engine/c_api.h.
_DTYPES = {np.dtype(np.uint8): 0, np.dtype(np.int64): 3}
_ALLGATHER = 1
_BROADCAST = 2


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Gives every rank the root's Python object.

    Args:
        obj: anything that can be pickled; only the root's counts.
        root_rank: the rank whose object it is.
        name: matches the call to the other ranks'; needed only where several threads
            of a rank call it at once.

    Returns:
        A copy of the root's object; on the root, `obj` itself.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        MismatchError: the ranks name different roots, or there is no such rank.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.broadcast_object({"epoch": 3})
    {'epoch': 3}
    """
    basics.require_initialized("broadcast_object")
    name = name or "unnamed_broadcast_object"
    is_root = basics.rank() == root_rank
    data = _pickled(obj) if is_root else np.empty(0, np.uint8)
    length = np.array(data.size, np.int64)
    _broadcast(length, root_rank, f"{name}/length")
    if not is_root:
        data = np.empty(int(length), np.uint8)
    _broadcast(data, root_rank, f"{name}/pickle")
    return obj if is_root else pickle.loads(data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Collects one Python object from each rank.

    Args:
        obj: anything that can be pickled.
        name: matches the call to the other ranks'; needed only where several threads
            of a rank call it at once.

    Returns:
        The objects in the order of the ranks, the same on all of them.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.allgather_object("from rank 0")
    ['from rank 0']
    """
    basics.require_initialized("allgather_object")
    name = name or "unnamed_allgather_object"
    data, lengths = _allgather(_pickled(obj), f"{name}/pickle")
    ends = np.cumsum(lengths)
    return [
        pickle.loads(data[end - length : end])
        for length, end in zip(lengths, ends, strict=True)
    ]


def _pickled(obj: Any) -> np.ndarray:
    return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)


def _broadcast(array: np.ndarray, root_rank: int, name: str) -> None:
    """Fills `array` with the root's elements; the root's is only read."""
    tensor = _tensor(array)
    tensor.output = array.ctypes.data
    _run(_BROADCAST, name, tensor, root=root_rank)


def _allgather(array: np.ndarray, name: str) -> tuple[np.ndarray, list[int]]:
    """All ranks' elements, and how many each gave."""
    gathered = np.empty(0, array.dtype)
    lengths: list[int] = []

    def allocate(context: int, first_dims: Any, count: int) -> int | None:
        nonlocal gathered
        lengths.extend(first_dims[:count])
        gathered = np.empty(sum(lengths), array.dtype)
        return gathered.ctypes.data

    _run(_ALLGATHER, name, _tensor(array), allocate=native.Allocate(allocate))
    return gathered, lengths


def _tensor(array: np.ndarray) -> native.Tensor:
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    return native.Tensor(
        dtype=_DTYPES[array.dtype],
        rank=array.ndim,
        shape=shape,
        input=array.ctypes.data,
    )


def _run(kind: int, name: str, tensor: native.Tensor, **fields: Any) -> None:
    request = native.Request(
        struct_size=ctypes.sizeof(native.Request),
        kind=kind,
        name=name.encode(),
        count=1,
        tensors=ctypes.pointer(tensor),
        **fields,
    )
    basics.check(native.engine().khvd_run(ctypes.byref(request)))
