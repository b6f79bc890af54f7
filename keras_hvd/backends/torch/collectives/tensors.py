"""Tensors of torch as the engine takes them: in place, by their address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keras_hvd.backends.dense_collectives import DenseTensor
from keras_hvd.backends.torch import gpu


def dense(tensor: torch.Tensor) -> DenseTensor:
    """A tensor's elements in the order of its memory.

    Its shape does not tell that order: ranks that give tensors of other strides would
    mix elements. The caller keeps the tensor until the collective has ended. Raises
    ValueError if the elements are not in memory that the engine knows, without gaps.

    >>> dense(torch.zeros(2, 3)).dtype
    'float32'
    """
    if not is_known(tensor) or not is_dense(tensor):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} on "
            f"{tensor.device} is not in memory without gaps"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    # torch has a minus sign, or a conjugate, as a mark on a tensor.
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"a tensor of {dtype} is a view that negates or conjugates")
    stream = gpu.stream_of(tensor)
    return DenseTensor(
        dtype,
        tuple(tensor.shape),
        tensor.data_ptr(),
        stream=None if stream is None else stream.cuda_stream,
    )


def is_known(tensor: torch.Tensor) -> bool:
    """Whether the elements are in host memory, or on a GPU of NVIDIA's.

    >>> is_known(torch.zeros(2)), is_known(torch.zeros(2, device="meta"))
    (True, False)
    """
    return tensor.device.type == "cpu" or gpu.has(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in memory without gaps, in whatever order.

    >>> is_dense(torch.zeros(2, 3).T), is_dense(torch.zeros(2, 3)[:, :2])
    (True, False)
    """
    if tensor.is_contiguous():
        return True
    elements = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != elements:
            return False
        elements *= size
    return True


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies, in order, for one collective: on the GPU if all are there, or the host.

    >>> copies([torch.zeros(2)])
    [tensor([0., 0.])]
    """
    if not all(map(gpu.has, tensors)) or len({each.device for each in tensors}) > 1:
        return [*map(copy_on_host, tensors)]
    ordered = torch.contiguous_format
    return [each.detach().clone(memory_format=ordered) for each in tensors]


def copy_on_host(value: Any) -> torch.Tensor:
    """A copy of a tensor or a Keras variable, in order and in host memory.

    >>> copy_on_host(torch.zeros(2, 3).T).is_contiguous()
    True
    """
    tensor = getattr(value, "value", value)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor.detach())
