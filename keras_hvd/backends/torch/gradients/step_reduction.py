"""The reduction of one step's gradients: each bucket is sent as soon as it is full."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from keras_hvd.backends.compression import NoneCompressor
from keras_hvd.backends.dense_collectives import Begun, DenseTensor, Together
from keras_hvd.backends.gradient_reduction import KIND, GradientReduction
from keras_hvd.backends.labels import labels_of
from keras_hvd.backends.torch import gpu
from keras_hvd.backends.torch.collectives.tensors import dense, is_dense, is_known
from keras_hvd.backends.variables import path
from keras_hvd.exceptions import KerasHvdError
from keras_hvd.job.process_sets import number_of


class StepReduction:
    """Reduces gradients, which are given one by one, in any order.

    The next step may use it again: what was told the engine is kept for gradients that
    are alike.

    Args:
        prefix: begins the names that match buckets between ranks.
        variables: those of the gradients. Ranks compare their labels, so a gradient
            that one rank does not give is an error on all.
        sizes: the bytes of each gradient.
        agreed: further settings that must be equal on all ranks; "" for none.
        in_place: whether results go where the gradients are. While backward runs, their
            memory may be that of others.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> weight = keras.Variable([1.0, 2.0], name="weight")
    >>> step = StepReduction(GradientReduction(), "sgd", [weight], [8], "")
    >>> step.give(0, torch.ones(2))
    >>> step.finish()
    {0: tensor([1., 1.])}
    """

    def __init__(
        self,
        reduction: GradientReduction,
        prefix: str,
        variables: Sequence[Any],
        sizes: Sequence[int],
        agreed: str,
        in_place: bool = True,
    ):
        self._reduction = reduction
        self._prefix = prefix
        self._variables = variables
        self._labels = labels_of([*map(path, variables)])
        self._agreed = [agreed] * bool(agreed)
        factor = reduction.gradient_predivide_factor
        if factor != 1:
            self._agreed.append(f"predivided by {factor!r}")
        self._process_set = number_of(reduction.process_set, KIND)
        # A rank without gradients compares labels, with a number for nothing.
        self._buckets = reduction.buckets(variables, sizes) or [[]]
        self._bucket_of = {
            place: number
            for number, bucket in enumerate(self._buckets)
            for place in bucket
        }
        self._in_place = in_place
        self._together = Together()
        # Of each bucket: the collective that can begin again.
        self._kept: dict[int, _Kept] = {}
        # Memory for the results of gradients whose own is not free for them.
        self._rooms: dict[int, torch.Tensor] = {}
        self._get_ready()

    def _get_ready(self) -> None:
        self._waits_for = [len(bucket) for bucket in self._buckets]
        self._begun: set[int] = set()
        self._given: dict[int, torch.Tensor] = {}
        # Where reductions go, and what restores the gradients from them.
        self._reduced: dict[int, tuple[torch.Tensor, Any]] = {}
        # The streams on which gradients were computed.
        self._streams: dict[int, torch.cuda.Stream | None] = {}

    def has(self, place: int) -> bool:
        """Whether a variable's gradient was given."""
        return place in self._given

    def give(self, place: int, grad: torch.Tensor) -> None:
        """Hands over a variable's gradient.

        Raises what `reducible` does, of this gradient or one before it.
        """
        self._given[place] = grad
        self._streams[place] = gpu.stream_of(grad)
        bucket = self._bucket_of[place]
        self._waits_for[bucket] -= 1
        if self._waits_for[bucket] == 0:
            self._begin(bucket)

    def finish(self) -> dict[int, torch.Tensor]:
        """Waits for all buckets, and returns the reduced gradients by their places."""
        with self._together:
            for bucket in range(len(self._buckets)):
                if bucket not in self._begun:
                    self._begin(bucket)
        gpu.wait_for(self._streams.values())
        decompress = self._reduction.compression.decompress
        factor = self._reduction.gradient_predivide_factor
        results = {place: decompress(*self._reduced[place]) for place in self._given}
        self._get_ready()
        if factor != 1:
            return {place: each.mul_(factor) for place, each in results.items()}
        return results

    def abandon(self) -> None:
        """Waits for what was sent, after an error: until then the engine has it."""
        with contextlib.suppress(KerasHvdError), self._together:
            pass
        self._get_ready()

    def _begin(self, number: int) -> None:
        self._begun.add(number)
        places = [place for place in self._buckets[number] if self.has(place)]
        gpu.wait_for(self._streams[place] for place in places)
        grads = [self._given[place] for place in places]
        natures = [] if self._in_place else [*map(_nature, grads)]
        kept = self._kept.get(number)
        if kept is None or (kept.places, kept.natures) != (places, natures):
            self._begin_anew(number, places, natures)
            return
        self._reduced.update((place, (self._rooms[place], None)) for place in places)
        stream = gpu.stream_of(grads[0])
        self._together.again(
            kept.begun,
            [grad.data_ptr() for grad in grads],
            None if stream is None else stream.cuda_stream,
        )

    def _begin_anew(self, number: int, places: list[int], natures: list[Any]) -> None:
        # Its results would go to memory that may be no longer there.
        self._kept.pop(number, None)
        sent = {place: self._sent(place) for place in places}
        # One request is of the host or of a GPU.
        on_host = [place for place in places if self._streams[place] is None]
        on_gpu = [place for place in places if self._streams[place] is not None]
        parts = [each for each in (on_host, on_gpu) if each] or [[]]
        for part, of_part in enumerate(parts):
            labels = [self._label(place, sent[place]) for place in of_part]
            begun = self._together.allreduce(
                f"{self._prefix}/gradients/{number}" + (f"/{part}" if part else ""),
                [self._dense(place, sent[place]) for place in of_part]
                or [dense(self._nothing)],
                self._reduction.op,
                self._process_set,
                "\n".join([*labels, *self._agreed]),
            )
        if len(parts) == 1 and places and all(map(self._is_same_next_time, places)):
            self._kept[number] = _Kept(places, natures, begun)

    def _is_same_next_time(self, place: int) -> bool:
        """Whether a gradient that is alike would be sent by another address alone."""
        reduced, _ = self._reduced[place]
        compresses = self._reduction.compression is not NoneCompressor
        return reduced is self._rooms.get(place) and not compresses

    @functools.cached_property
    def _nothing(self) -> torch.Tensor:
        device = self._variables[0].value.device if self._variables else "cpu"
        return torch.zeros(1, device=device)

    def _label(self, place: int, sent: torch.Tensor) -> str:
        label = self._labels[place]
        # Elements are reduced in the order of memory.
        strided = "" if sent.is_contiguous() else f" with strides {sent.stride()}"
        return label + strided

    def _dense(self, place: int, sent: torch.Tensor) -> DenseTensor:
        reduced, _ = self._reduced[place]
        return dense(sent)._replace(result=reduced.data_ptr())

    def _sent(self, place: int) -> torch.Tensor:
        """The tensor to send, without gaps; notes where its reduction goes."""
        given = self._given[place]
        grad = reducible(self._reduction, given, self._variables[place])
        factor = self._reduction.gradient_predivide_factor
        if factor != 1:
            grad = grad.div_(factor) if self._in_place else grad / factor
        sent, context = self._reduction.compression.compress(grad)
        sent = sent if is_dense(sent) else sent.contiguous()
        reduced = sent
        # A compressor may return the gradient, or a view of it.
        if not self._in_place and _share_memory(sent, given):
            reduced = self._room(place, sent)
        self._reduced[place] = reduced, context
        return sent

    def _room(self, place: int, sent: torch.Tensor) -> torch.Tensor:
        room = self._rooms.get(place)
        if room is None or _nature(room) != _nature(sent):
            room = self._rooms[place] = torch.empty_like(sent)
        return room


class _Kept(NamedTuple):
    """A bucket's collective that can begin again, for gradients that are alike."""

    places: list[int]
    natures: list[Any]
    begun: Begun


def _nature(grad: torch.Tensor) -> tuple[Any, ...]:
    """What the engine was told of a gradient but its address, and what was checked."""
    # One that is sparse has no strides, and is never sent as it is.
    strides = grad.stride() if grad.layout == torch.strided else None
    return type(grad), grad.dtype, grad.shape, strides, grad.device, grad.is_neg()


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout != other.layout:
        return False
    first, second = one.untyped_storage(), other.untyped_storage()
    return first.data_ptr() == second.data_ptr()


def reducible(reduction: GradientReduction, grad: Any, variable: Any) -> torch.Tensor:
    """A gradient in memory without gaps: itself, if possible.

    Raises TypeError or NotImplementedError if keras_hvd cannot reduce it.

    >>> reducible(GradientReduction(), torch.ones(2), None)
    tensor([1., 1.])
    """
    if not isinstance(grad, torch.Tensor):
        raise TypeError(
            f"the gradient of {path(variable)!r} must be a tensor of torch; got "
            f"{type(grad).__module__}.{type(grad).__qualname__}"
        )
    if grad.layout != torch.strided:
        if not reduction.sparse_as_dense:
            raise NotImplementedError(
                f"the gradient of {path(variable)!r} is sparse, which keras_hvd does "
                "not reduce on torch: pass sparse_as_dense=True to "
                "DistributedOptimizer, or make the layer with sparse=False"
            )
        grad = grad.to_dense()
    if not is_known(grad):
        raise NotImplementedError(
            f"the gradient of {path(variable)!r} is on {grad.device}, and on torch "
            "keras_hvd reduces gradients in host memory and on GPUs of NVIDIA's alone: "
            "set the environment variable KERAS_TORCH_DEVICE=cpu"
        )
    if grad.is_complex():
        raise NotImplementedError(
            f"the gradient of {path(variable)!r} has the type {grad.dtype}, which "
            "cannot be reduced: keep the real and the imaginary part in two variables"
        )
    return grad if is_dense(grad) else grad.contiguous()
