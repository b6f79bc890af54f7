"""Collectives of dense tensors, over the C API: for any framework, or none."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from keras_hvd import exceptions
from keras_hvd.backends.reduce_op import ReduceOp
from keras_hvd.job import basics, native, script_end

# Each block is its own submitter, so a thread's does not queue behind another's.
_submitters = itertools.count(1)

_NOTHING = ctypes.c_char()


class DenseTensor(NamedTuple):
    """A tensor whose elements are in memory, of the host or a GPU, without gaps."""

    dtype: str
    shape: tuple[int, ...]
    address: int
    # Where the result goes; None: to the same place; 0: where `allocate` says.
    result: int | None = None
    # The CUDA stream of the work on a tensor that is on a GPU. None: on the host.
    stream: int | None = None

    @classmethod
    def of_array(cls, array: np.ndarray) -> DenseTensor:
        """A NumPy array, which the caller keeps until the collective has ended.

        Raises ValueError if its elements are not in order, without gaps.

        >>> DenseTensor.of_array(np.zeros((2, 3), np.float32)).shape
        (2, 3)
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {array.shape} is not contiguous")
        return cls(array.dtype.name, array.shape, array.ctypes.data)


class Together:
    """A context for collectives that run at the same time.

    They have ended when the context has. Then the first error is raised. Of tensors on
    a GPU, what is put on their stream later finds the results.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> array = np.array([1.0, 2.0])
    >>> tensors = [DenseTensor.of_array(array)]
    >>> with Together() as collectives:
    ...     begun = collectives.allreduce("sums", tensors, ReduceOp.Sum)
    >>> array
    array([1., 2.])
    """

    def __init__(self) -> None:
        self._submitter = next(_submitters)
        self._begun: list[Begun] = []
        # Python's functions that the engine calls, and what they have raised.
        self._called: list[Any] = []
        self._raised: BaseException | None = None

    def allreduce(
        self,
        name: str,
        tensors: Sequence[DenseTensor],
        op: ReduceOp,
        process_set: int = 0,
        labels: str = "",
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> Begun:
        """Begins to reduce a group. `labels` is a text on which the ranks must agree.

        `scales` multiply the elements before and after.

        Raises TypeError if the tensors' type cannot be reduced.
        """
        for each in tensors:
            _require_type(name, "reduced", each, native.REDUCED_DTYPES)
        return self._begin(
            native.ALLREDUCE,
            name,
            tensors,
            reduce_op=int(op),
            process_set=process_set,
            labels=labels.encode() or None,
            prescale=scales[0],
            postscale=scales[1],
        )

    def broadcast(
        self, name: str, tensor: DenseTensor, root: int, process_set: int = 0
    ) -> None:
        """Begins to fill a tensor with the root's elements.

        Raises TypeError if the tensor's type cannot be sent.
        """
        _require_type(name, "sent", tensor, native.DTYPES)
        self._begin(
            native.BROADCAST, name, [tensor], root=root, process_set=process_set
        )

    def allgather(
        self,
        name: str,
        tensors: Sequence[DenseTensor],
        allocate: Callable[[int, list[int]], int],
        process_set: int = 0,
    ) -> None:
        """Begins to join the ranks' rows of each tensor.

        `allocate` takes a tensor's index and each rank's number of rows, and returns
        the address of memory for all. Raises TypeError if a type cannot be sent.
        """
        for each in tensors:
            _require_type(name, "sent", each, native.DTYPES)

        def room(_: int, tensor: int, first_dims: Any, count: int) -> int | None:
            # After an exception ctypes would return any address, even for an interrupt.
            try:
                # What is empty has no address, and NULL would mean that it has failed.
                return allocate(tensor, first_dims[:count]) or ctypes.addressof(
                    _NOTHING
                )
            except BaseException as error:
                self._raised = error
                return None

        self._called.append(native.Allocate(room))
        self._begin(
            native.ALLGATHER,
            name,
            [each._replace(result=0) for each in tensors],
            allocate=self._called[-1],
            process_set=process_set,
        )

    def barrier(self, name: str, process_set: int = 0) -> None:
        """Begins to wait for the other ranks."""
        self._begin(native.BARRIER, name, [], process_set=process_set)

    def again(
        self, begun: Begun, addresses: Sequence[int], stream: int | None = None
    ) -> None:
        """Begins a collective that has ended, with tensors at other addresses.

        Each is like the one before it, on the same device. Results go to the same
        places. `stream` is that of tensors on a GPU.
        """
        begun.move(addresses, stream)
        self._start(begun)

    def _begin(
        self, kind: int, name: str, tensors: Sequence[DenseTensor], **fields: Any
    ) -> Begun:
        streams = {each.stream for each in tensors} or {None}
        if len(streams) > 1:
            raise ValueError(f"{name!r}: tensors of several devices in one collective")
        [stream] = streams
        given = (native.Tensor * len(tensors))(*map(_given, tensors))
        request = native.Request(
            kind=kind,
            name=name.encode(),
            submitter=self._submitter,
            count=len(tensors),
            tensors=given,
            on_gpu=stream is not None,
            stream=stream,
            **fields,
        )
        begun = Begun(request, given)
        self._start(begun)
        return begun

    def _start(self, begun: Begun) -> None:
        script_end.note_collective()
        begun.begin()
        self._begun.append(begun)

    def __enter__(self) -> Together:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        first: BaseException | None = None
        # All of them: until its end the engine has a collective's memory.
        for each in self._begun:
            try:
                each.finish()
            except exceptions.KerasHvdError as failed:
                first = first or failed
            except BaseException as raised:
                # By a signal's handler, while it waited.
                first = raised
        self._begun.clear()
        self._called.clear()
        of_called, self._raised = self._raised, None
        if first is None or error is not None:
            return
        if of_called is not None:
            raise of_called from first
        raise first


class Begun:
    """A collective that has begun, and that `Together.again` begins anew."""

    def __init__(self, request: native.Request, tensors: Any):
        self.request = request
        self._tensors = tensors
        self._running = ctypes.c_void_p()
        self._end = ctypes.c_void_p()
        request.end = ctypes.pointer(self._end)

    def begin(self) -> None:
        """Hands it to the engine."""
        basics.check(
            native.engine().khvd_begin(
                ctypes.byref(self.request), ctypes.byref(self._running)
            )
        )

    def move(self, addresses: Sequence[int], stream: int | None) -> None:
        """Changes where its tensors are, and the stream of the work on them."""
        for tensor, address in zip(self._tensors, addresses, strict=True):
            tensor.input = address
        self.request.stream = stream

    def finish(self) -> None:
        """Waits for its end, or until what follows on the stream will."""
        engine = native.engine()
        basics.check(engine.khvd_finish(self._running))
        if self.request.on_gpu:
            basics.check(engine.khvd_await_end(self._end, self.request.stream))


def _given(tensor: DenseTensor) -> native.Tensor:
    return native.Tensor(
        dtype=native.DTYPES[tensor.dtype],
        rank=len(tensor.shape),
        shape=(ctypes.c_int64 * len(tensor.shape))(*tensor.shape),
        input=tensor.address,
        output=tensor.address if tensor.result is None else tensor.result,
    )


def _require_type(
    name: str, done: str, tensor: DenseTensor, known: dict[str, int]
) -> None:
    if tensor.dtype not in known:
        raise TypeError(
            f"{name!r}: tensors of {tensor.dtype} cannot be {done}; got one of shape "
            f"{tensor.shape}. Cast it to one of {', '.join(known)}"
        )
