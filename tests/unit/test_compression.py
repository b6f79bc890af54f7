"""Tensors as they travel, and as they come back."""

import numpy as np
import pytest
import tensorflow as tf

from keras_hvd import Compression

WIDE = [tf.float32, tf.float64]
KEPT = [tf.float16, tf.bfloat16, tf.int32, tf.int64, tf.bool]


@pytest.mark.parametrize("dtype", [*WIDE, *KEPT])
def test_none(dtype):
    tensor = tf.cast([0, 1], dtype)
    travels, context = Compression.none.compress(tensor)
    assert travels is tensor
    assert Compression.none.decompress(travels, context) is tensor


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize(
    ("compressor", "travels_as", "precision"),
    [
        (Compression.fp16, tf.float16, 2.0**-11),
        (Compression.bf16, tf.bfloat16, 2.0**-8),
    ],
)
def test_cast(compressor, travels_as, precision, dtype):
    tensor = tf.constant(np.linspace(-3, 3, 101), dtype)
    travels, context = compressor.compress(tensor)
    assert travels.dtype == travels_as
    again = compressor.decompress(travels, context)
    assert again.dtype == dtype
    np.testing.assert_allclose(again, tensor, rtol=precision, atol=1e-6)
    assert np.any(again != tensor)


@pytest.mark.parametrize("dtype", KEPT)
@pytest.mark.parametrize("compressor", [Compression.fp16, Compression.bf16])
def test_types_that_are_not_cast(compressor, dtype):
    tensor = tf.cast([0, 1], dtype)
    travels, context = compressor.compress(tensor)
    assert travels is tensor
    assert compressor.decompress(travels, context).dtype == dtype
