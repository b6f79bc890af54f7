"""What all collectives of torch's tensors share: arguments, names and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from keras_hvd.backends.host_collectives import Together
from keras_hvd.backends.torch.collectives import reductions
from keras_hvd.job import arrival, unnamed
from keras_hvd.job.process_sets import ProcessSet, number_of

_turns = unnamed.Turns()

# A collective of tensors without gradients, and that of its results' gradients.
Collective = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@contextlib.contextmanager
def call(
    kind: str, name: str | None, process_set: ProcessSet
) -> Iterator[tuple[Together, str, int]]:
    """A context for a call of a public function, which ends with the collective.

    Gives the collectives, the name between ranks, and the process set's number.

    Raises NotInitializedError, ValueError if the process set is not part of the job,
    and what `unnamed.Turns.name` does.
    """
    arrival.require_arrived(kind)
    number = number_of(process_set, kind)
    with _turns.name(kind, name, number) as known, Together() as collectives:
        yield collectives, known, number


def as_tensor(kind: str, value: Any) -> torch.Tensor:
    """A tensor of a value, which may be a Keras variable.

    Raises ValueError if torch cannot make one of it.

    >>> as_tensor("allreduce", [1, 2]).dtype
    torch.int64
    """
    try:
        tensor = torch.as_tensor(getattr(value, "value", value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{kind} takes what torch can convert to a tensor; got "
            f"{type(value).__name__}: {error}"
        ) from error
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{kind} takes dense tensors; got one of {tensor.layout}: make it dense, "
            "with to_dense()"
        )
    return tensor


def with_gradient(
    tensors: Sequence[torch.Tensor], collective: Collective, gradient: Collective
) -> list[torch.Tensor]:
    """A collective's results, on the tensors' devices, which can be differentiated."""
    return [*_WithGradient.apply(collective, gradient, *tensors)]


def note(
    given: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    process_set: int,
    sums: bool,
) -> None:
    """Counts a collective; marks its results if they are sums outside a forward pass.

    One of tensors that need gradients is part of a forward pass, and reduces none.
    """
    is_forward = any(each.requires_grad for each in results)
    reductions.note(given, is_forward)
    if sums and not is_forward:
        for each in results:
            reductions.mark(each, process_set)


class _WithGradient(torch.autograd.Function):
    """A collective whose gradient is a collective too."""

    @staticmethod
    def forward(ctx, collective, gradient, *tensors):
        ctx.gradient = gradient
        ctx.set_materialize_grads(True)
        results = collective(tensors)
        return tuple(
            result.to(tensor.device)
            for result, tensor in zip(results, tensors, strict=True)
        )

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *ctx.gradient(grads)
