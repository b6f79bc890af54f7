"""What all collectives of torch's tensors share: arguments, names and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_hvd.backends.dense_collectives import Together
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
    """A tensor of a value; one that is a tensor already, or a Keras variable, is kept.

    Raises ValueError if torch cannot make one of it, and TypeError if it is sparse.

    Example:

    >>> as_tensor("allreduce", [1, 2]).dtype
    torch.int64
    """
    if isinstance(value, (list, tuple)) and any(map(_has_tensors, value)):
        return torch.stack([as_tensor(kind, each) for each in value])
    value = getattr(value, "value", value)
    if isinstance(value, np.ndarray):
        value = np.ascontiguousarray(value)
    if not isinstance(value, torch.Tensor):
        try:
            return torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{kind} takes what torch can convert to a tensor; got "
                f"{type(value).__name__}: {error}"
            ) from error
    if value.layout != torch.strided:
        raise TypeError(
            f"{kind} takes dense tensors; got one of {value.layout}: make it dense, "
            "with to_dense()"
        )
    return value


def require_unused(kind: str, **unused: Any) -> None:
    """Raises TypeError if an argument without effect has a value, as in a wrong place.

    >>> require_unused("allgather", ignore_name_scope=False)
    >>> require_unused("allgather", ignore_name_scope="loss")
    Traceback (most recent call last):
    TypeError: allgather: ignore_name_scope has no effect on torch; got 'loss'. Give ...
    """
    for argument, value in unused.items():
        if not isinstance(value, bool) and value != "":
            raise TypeError(
                f"{kind}: {argument} has no effect on torch; got {value!r}. Give what "
                "follows the tensor by name, as in name=, op= and process_set="
            )


def with_gradient(
    tensors: Sequence[torch.Tensor],
    collective: Collective,
    gradient: Collective,
    described: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> list[torch.Tensor]:
    """A collective's results, on the tensors' devices, which can be differentiated.

    Where Keras only describes a model, with made-up numbers, which other ranks need not
    do, each result is `described` of its tensor.
    """
    if in_symbolic_scope() or any(each.device.type == "meta" for each in tensors):
        return [*map(described, tensors)]
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


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(getattr(value, "value", value), torch.Tensor)


class _WithGradient(torch.autograd.Function):
    """A collective whose gradient is a collective too."""

    @staticmethod
    def forward(ctx, collective, gradient, *tensors):
        ctx.gradient = gradient
        results = collective(tensors)
        return tuple(
            result.to(tensor.device)
            for result, tensor in zip(results, tensors, strict=True)
        )

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *ctx.gradient(grads)
