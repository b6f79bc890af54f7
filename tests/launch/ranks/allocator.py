"""A rank for the tests of allocators: the page faults of a large allreduce in a graph.

With `late` it uses TensorFlow before it joins. Writes a line of JSON.
"""

import json
import resource
import statistics
import sys

import tensorflow as tf

import keras_hvd

BYTES = 64 << 20

given = tf.ones([BYTES // 4]) if "late" in sys.argv else None
keras_hvd.init()
given = tf.ones([BYTES // 4]) if given is None else given


@tf.function
def step(x: tf.Tensor) -> tf.Tensor:
    return keras_hvd.allreduce(x, op=keras_hvd.Sum)


def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    result = step(given)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tf.debugging.assert_equal(result, float(keras_hvd.size()))
    return after - before


step(given)
print(json.dumps(statistics.median(faults() for _ in range(5))))
