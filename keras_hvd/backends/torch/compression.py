"""Compression of gradients in collectives."""

from __future__ import annotations

import torch

from keras_hvd.backends.compression import Compressor, NoneCompressor


class _CastCompressor(Compressor):
    """Casts floating-point tensors to a smaller type, and back."""

    _travels_as: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Casts a wider floating-point tensor; also returns the original type."""
        is_wider = tensor.element_size() > cls._travels_as.itemsize
        if tensor.is_floating_point() and is_wider:
            return tensor.to(cls._travels_as), tensor.dtype
        return tensor, tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, context: torch.dtype) -> torch.Tensor:
        """Casts a tensor back to its original type."""
        return tensor.to(context)


class FP16Compressor(_CastCompressor):
    """Casts floating-point tensors to float16, which overflows beyond 65504.

    Example:

    >>> travels, context = FP16Compressor.compress(torch.tensor([1.5, 1e6]))
    >>> travels
    tensor([1.5000,    inf], dtype=torch.float16)
    >>> FP16Compressor.decompress(travels, context)
    tensor([1.5000,    inf])
    """

    _travels_as = torch.float16


class BF16Compressor(_CastCompressor):
    """Casts floating-point tensors to bfloat16: float32's range, 8 bits of precision.

    Example:

    >>> travels, context = BF16Compressor.compress(torch.tensor([1.5, 256.5]))
    >>> BF16Compressor.decompress(travels, context)
    tensor([  1.5000, 256.0000])
    """

    _travels_as = torch.bfloat16


class Compression:
    """The compressors for optimizers: `none`, `fp16`, `bf16`.

    Example:

    >>> travels, _ = Compression.fp16.compress(torch.tensor([1.5]))
    >>> travels.dtype
    torch.float16
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
