"""TensorFlow's types of elements, by what the collectives do with them."""

import tensorflow as tf

INTEGERS = [tf.uint8, tf.int8, tf.int32, tf.int64, tf.uint32, tf.uint64]
# Not all supported versions of TensorFlow have these as attributes.
FLOAT8 = [tf.as_dtype("float8_e5m2"), tf.as_dtype("float8_e4m3fn")]
FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64, *FLOAT8]
NUMBERS = [*INTEGERS, *FLOATS]
# Truth values have no sums.
REDUCED = [*NUMBERS, tf.bool]
# Types that are never reduced.
MOVED = [tf.int16, tf.uint16, tf.complex64, tf.complex128]
