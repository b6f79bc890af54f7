"""Compression of gradients in collectives."""

from __future__ import annotations

import tensorflow as tf

from keras_hvd.backends.compression import Compressor, NoneCompressor


class _CastCompressor(Compressor):
    """Casts floating-point tensors to a smaller type, and back."""

    _travels_as: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """Casts a wider floating-point tensor; also returns the original type."""
        if tensor.dtype.is_floating and tensor.dtype.size > cls._travels_as.size:
            return tf.cast(tensor, cls._travels_as), tensor.dtype
        return tensor, tensor.dtype

    @classmethod
    def decompress(cls, tensor: tf.Tensor, context: tf.DType) -> tf.Tensor:
        """Casts a tensor back to its original type."""
        return tf.cast(tensor, context)


class FP16Compressor(_CastCompressor):
    """Casts floating-point tensors to float16, which overflows beyond 65504.

    Example:

    >>> travels, context = FP16Compressor.compress(tf.constant([1.5, 1e6]))
    >>> travels.numpy()
    array([1.5, inf], dtype=float16)
    >>> FP16Compressor.decompress(travels, context).numpy()
    array([1.5, inf], dtype=float32)
    """

    _travels_as = tf.float16


class BF16Compressor(_CastCompressor):
    """Casts floating-point tensors to bfloat16: float32's range, 8 bits of precision.

    Example:

    >>> travels, context = BF16Compressor.compress(tf.constant([1.5, 256.5]))
    >>> BF16Compressor.decompress(travels, context).numpy()
    array([  1.5, 256. ], dtype=float32)
    """

    _travels_as = tf.bfloat16


class Compression:
    """The compressors for collectives and optimizers: `none`, `fp16`, `bf16`.

    Example:

    >>> travels, _ = Compression.fp16.compress(tf.constant([1.5]))
    >>> travels.dtype
    tf.float16
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
