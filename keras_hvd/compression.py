"""What tensors are turned into for the way between the ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class NoneCompressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """What travels, and what `decompress` has to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """What arrived, as it was given."""
        return tensor


class _CastCompressor:
    """Floating-point tensors travel as another type; others stay as they are."""

    _dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """What travels, and what `decompress` has to know."""
        if not tensor.dtype.is_floating:
            return tensor, tensor.dtype
        return tf.cast(tensor, cls._dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        """What arrived, as it was given."""
        return tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """Floating-point tensors travel as float16."""

    _dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """Floating-point tensors travel as bfloat16."""

    _dtype = tf.bfloat16


class Compression:
    """What the ranks may exchange instead of a floating-point tensor itself.

    Example:

    >>> compressed, ctx = Compression.fp16.compress(tf.constant([1.0, 2.0]))
    >>> compressed.dtype, Compression.fp16.decompress(compressed, ctx).dtype
    (tf.float16, tf.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
