"""Sends pickled Python objects between ranks, over the engine's C API.

It uses no TensorFlow op, so it works anywhere: eagerly, while a graph is traced, and
before TensorFlow is imported.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_hvd.exceptions import KerasHvdError, MismatchError
from keras_hvd.job import arrival, basics, native, pickling, script_end, unnamed
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of

_turns = unnamed.Turns()

# Every call is its own submitter, so a thread's call does not queue behind another's.
_callers = itertools.count(1)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every rank the root's Python object.

    Args:
        obj: any object that cloudpickle can pickle, also a lambda or an object of a
            notebook's class; only the root's matters.
        root_rank: the rank that sends its object, counted in the whole job.
        session: None; objects need no session of TensorFlow 1.
        name: matches the call to the other ranks' calls; needed only if several threads
            of a rank call it at once.
        process_set: the ranks that take part; by default all of them.

    Returns:
        A copy of the root's object; on the root, `obj` itself.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: `session` is given, `root_rank` is not a whole number, or `name` is
            not a string.
        ValueError: the process set is not part of the job, or `name` is empty.
        Exception: on the root, cloudpickle's error, if its object cannot be pickled.
        MemoryError: this rank has no memory for the object.
        MismatchError: the root's object cannot be pickled, or one of the others has no
            memory for it (on the rest); the ranks name different roots, or the root
            does not exist; or another thread of this rank also calls it without a name.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.broadcast_object({"epoch": 3})
    {'epoch': 3}
    """
    arrival.require_arrived("broadcast_object")
    _refuse_session("broadcast_object", session)
    number = number_of(process_set, "broadcast_object")
    root_rank = basics.root_of("broadcast_object", root_rank)
    is_root = basics.rank() == root_rank
    data, error = _pickled(obj) if is_root else (np.empty(0, np.uint8), None)
    length = np.array(data.size, np.int64)
    with _turns.name("broadcast_object", name, number) as name:
        broadcast_array(length, root_rank, f"{name}/length", number)
        if not length:
            raise error or _not_pickled("broadcast_object", root_rank)
        if not is_root:
            data, error = _room_for(int(length))
        try:
            broadcast_array(data, root_rank, f"{name}/pickle", number)
        except MismatchError as mismatch:
            # Roots and lengths agree by now.
            raise error or _no_room("broadcast_object", mismatch) from mismatch
    return obj if is_root else pickle.loads(data.data)


def broadcast_object_fn(
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A `broadcast_object` with all arguments except the object.

    Args:
        root_rank: the rank that sends its object, counted in the whole job.
        session: None; objects need no session of TensorFlow 1.
        name: as for `broadcast_object`.
        process_set: the ranks that take part; by default all of them.

    Returns:
        A function from this rank's object to the root's.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: `session` is given, `root_rank` is not a whole number, or `name` is
            not a string.
        ValueError: the process set is not part of the job, or `name` is empty.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> from_rank_0 = keras_hvd.broadcast_object_fn()
    >>> from_rank_0([1, 2])
    [1, 2]
    """
    basics.require_initialized("broadcast_object_fn")
    _refuse_session("broadcast_object_fn", session)
    number_of(process_set, "broadcast_object_fn")
    basics.root_of("broadcast_object_fn", root_rank)
    if name is not None:
        unnamed.require_name("broadcast_object_fn", name)
    return lambda obj: broadcast_object(obj, root_rank, None, name, process_set)


def allgather_object(
    obj: Any,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Collects one Python object from each rank.

    Args:
        obj: any object that cloudpickle can pickle, as for `broadcast_object`.
        session: None; objects need no session of TensorFlow 1.
        name: matches the call to the other ranks' calls; needed only if several threads
            of a rank call it at once.
        process_set: the ranks that take part; by default all of them.

    Returns:
        The objects in the order of ranks, the same list on all of them.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: `session` is given, or `name` is not a string.
        ValueError: the process set is not part of the job, or `name` is empty.
        Exception: cloudpickle's error, if this rank's object cannot be pickled.
        MemoryError: this rank has no memory for all objects; the others get theirs.
        MismatchError: another rank's object cannot be pickled; or another thread of
            this rank also calls it without a name.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.allgather_object("from rank 0")
    ['from rank 0']
    """
    arrival.require_arrived("allgather_object")
    _refuse_session("allgather_object", session)
    number = number_of(process_set, "allgather_object")
    own, error = _pickled(obj)
    with _turns.name("allgather_object", name, number) as name:
        data, lengths = _allgather(own, f"{name}/pickle", number)
    if 0 in lengths:
        raise error or _not_pickled(
            "allgather_object", process_set.ranks[lengths.index(0)]
        )
    ends = np.cumsum(lengths)
    return [
        pickle.loads(data[end - length : end].data)
        for length, end in zip(lengths, ends, strict=True)
    ]


def _refuse_session(function: str, session: Any) -> None:
    if session is not None:
        raise TypeError(
            f"{function}: session must be None, because objects need no session; "
            f"got {session!r}"
        )


def _pickled(obj: Any) -> tuple[np.ndarray, Exception | None]:
    """An object's pickle; or no bytes, which is never a pickle, and the reason."""
    try:
        data = pickling.dumps(obj)
    except Exception as error:
        return np.empty(0, np.uint8), error
    return np.frombuffer(data, np.uint8), None


def _room_for(length: int) -> tuple[np.ndarray, Exception | None]:
    """Memory for a pickle; or none, which fits no pickle, and the reason.

    A rank without memory still takes part, since the others would wait for it.
    """
    try:
        return np.empty(length, np.uint8), None
    except MemoryError as error:
        return np.empty(0, np.uint8), error


def _no_room(function: str, mismatch: MismatchError) -> MismatchError:
    """The error on the other ranks if a rank has no memory for an object."""
    return MismatchError(
        f"{function}: a rank without memory for the object has given 0 bytes for it; "
        f"the error that it raised says more: {mismatch}"
    )


def _not_pickled(function: str, rank: int) -> MismatchError:
    """The error on ranks that wait for an object that does not come."""
    return MismatchError(
        f"{function}: what rank {rank} gave cannot be pickled; the error that it "
        "raised says why"
    )


def broadcast_array(
    array: np.ndarray, root_rank: int, name: str, process_set: int = 0
) -> None:
    """Fills `array` with the root's elements; on the root it is only read."""
    tensor = _tensor(array)
    tensor.output = array.ctypes.data
    _run(native.BROADCAST, name, tensor, root=root_rank, process_set=process_set)


def _allgather(
    array: np.ndarray, name: str, process_set: int
) -> tuple[np.ndarray, list[int]]:
    """Returns all ranks' elements, and the number from each rank."""
    gathered = np.empty(0, array.dtype)
    lengths: list[int] = []
    error: BaseException | None = None

    def allocate(_: int, tensor: int, first_dims: Any, count: int) -> int | None:
        nonlocal gathered, error
        # After an exception ctypes would return any address, even for an interrupt.
        try:
            lengths.extend(first_dims[:count])
            gathered = np.empty(sum(lengths), array.dtype)
        except BaseException as raised:
            error = raised
            return None
        return gathered.ctypes.data

    try:
        _run(
            native.ALLGATHER,
            name,
            _tensor(array),
            allocate=native.Allocate(allocate),
            process_set=process_set,
        )
    except KerasHvdError as failure:
        raise error or failure from failure
    return gathered, lengths


def _tensor(array: np.ndarray) -> native.Tensor:
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    return native.Tensor(
        dtype=native.DTYPES[array.dtype.name],
        rank=array.ndim,
        shape=shape,
        input=array.ctypes.data,
    )


def _run(kind: int, name: str, tensor: native.Tensor, **fields: Any) -> None:
    script_end.note_collective()
    request = native.Request(
        kind=kind,
        name=name.encode(),
        submitter=next(_callers),
        count=1,
        tensors=ctypes.pointer(tensor),
        **fields,
    )
    basics.check(native.engine().khvd_run(ctypes.byref(request)))
