"""The reduction of one step's gradients: each bucket is sent as soon as it is full."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from keras_hvd.backends.compression import NoneCompressor
from keras_hvd.backends.dense_collectives import DenseTensor, Together
from keras_hvd.backends.gradient_reduction import KIND, GradientReduction
from keras_hvd.backends.labels import labels_of
from keras_hvd.backends.torch import gpu
from keras_hvd.backends.torch.collectives.tensors import dense, is_dense, is_known
from keras_hvd.backends.variables import path
from keras_hvd.exceptions import KerasHvdError
from keras_hvd.job.process_sets import number_of


class StepReduction:
    """Reduces gradients, which are given one by one, in any order.

    Args:
        prefix: begins the names that match buckets between ranks.
        variables: those of the gradients. Ranks compare their labels, so a gradient
            that one rank does not give is an error on all.
        sizes: the bytes of each gradient.
        agreed: further settings that must be equal on all ranks; "" for none.
        results: where the results go, by place, from a step before; missing ones are
            added. None: in the place of the gradients. While backward runs, theirs may
            be the memory of others.

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
        results: dict[int, torch.Tensor] | None = None,
    ):
        self._reduction = reduction
        self._prefix = prefix
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
        self._waits_for = [len(bucket) for bucket in self._buckets]
        self._begun: set[int] = set()
        self._results = results
        # What is sent, where its reduction goes, and what restores the gradient.
        self._given: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}
        self._device = variables[0].value.device if variables else "cpu"
        # The streams on which gradients were computed.
        self._streams: dict[int, torch.cuda.Stream | None] = {}
        self._together = Together()

    def has(self, place: int) -> bool:
        """Whether a variable's gradient was given."""
        return place in self._given

    def give(self, place: int, grad: torch.Tensor) -> None:
        """Hands over a variable's gradient, in memory without gaps."""
        label = self._labels[place]
        if not grad.is_contiguous():
            # Elements are reduced in the order of memory.
            self._labels[place] = f"{label} with strides {grad.stride()}"
        sent, context = self._compressed(grad)
        self._given[place] = sent, self._result(place, sent, grad), context
        self._streams[place] = gpu.stream_of(sent)
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
        results = {
            place: decompress(reduced, context)
            for place, (_, reduced, context) in self._given.items()
        }
        if factor != 1:
            return {place: each.mul_(factor) for place, each in results.items()}
        return results

    def abandon(self) -> None:
        """Waits for what was sent, after an error: until then the engine has it."""
        with contextlib.suppress(KerasHvdError), self._together:
            pass

    def _result(
        self, place: int, sent: torch.Tensor, grad: torch.Tensor
    ) -> torch.Tensor:
        # A compressor may return the gradient, or a view of it.
        if self._results is None or not _share_memory(sent, grad):
            return sent
        kept = self._results.get(place)
        if kept is None or not _are_alike(kept, sent):
            kept = self._results[place] = torch.empty_like(sent)
        return kept

    def _begin(self, number: int) -> None:
        self._begun.add(number)
        bucket = [place for place in self._buckets[number] if self.has(place)]
        gpu.wait_for(self._streams[place] for place in bucket)
        # One request is of the host or of a GPU.
        on_host = [place for place in bucket if self._streams[place] is None]
        on_gpu = [place for place in bucket if self._streams[place] is not None]
        parts = [each for each in (on_host, on_gpu) if each] or [[]]
        for part, places in enumerate(parts):
            self._together.allreduce(
                f"{self._prefix}/gradients/{number}" + (f"/{part}" if part else ""),
                [self._sent(place) for place in places] or [dense(self._nothing)],
                self._reduction.op,
                self._process_set,
                "\n".join([*(self._labels[place] for place in places), *self._agreed]),
            )

    @functools.cached_property
    def _nothing(self) -> torch.Tensor:
        return torch.zeros(1, device=self._device)

    def _sent(self, place: int) -> DenseTensor:
        sent, reduced, _ = self._given[place]
        return dense(sent)._replace(result=reduced.data_ptr())

    def _compressed(self, grad: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, without gaps, and what restores the gradient from it."""
        factor = self._reduction.gradient_predivide_factor
        if factor != 1:
            grad = grad.div_(factor) if self._results is None else grad / factor
        if self._reduction.compression is NoneCompressor:
            return grad, None
        sent, context = self._reduction.compression.compress(grad)
        return (sent if is_dense(sent) else sent.contiguous()), context


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (
        (each.dtype, each.shape, each.stride(), each.device) for each in (one, other)
    )
    return first == second


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
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
