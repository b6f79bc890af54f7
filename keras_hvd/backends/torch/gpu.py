"""NVIDIA's GPUs: which tensors are on one, and the order of the work there."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def has(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU of NVIDIA's.

    >>> has(torch.zeros(2))
    False
    """
    # ROCm's GPUs have this type too.
    return tensor.device.type == "cuda" and torch.version.hip is None


def stream_of(tensor: torch.Tensor) -> torch.cuda.Stream | None:
    """The stream on which torch now works with a tensor on a GPU; None for others.

    >>> stream_of(torch.zeros(2)) is None
    True
    """
    return torch.cuda.current_stream(tensor.device) if has(tensor) else None


def wait_for(streams: Iterable[torch.cuda.Stream | None]) -> None:
    """Makes later work on the current stream run after what is on other streams.

    Example:

    >>> wait_for([None])
    """
    for stream in {each for each in streams if each is not None}:
        current = torch.cuda.current_stream(stream.device)
        if stream != current:
            current.wait_stream(stream)
