"""A rank of the tests through TensorFlow: collectives and a training on one device.

`python tensorflow_rank.py DEVICE`, where DEVICE is GPU or CPU: TensorFlow's first one
after `keras_hvd.init()`.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import keras_hvd

DTYPES = (
    *(tf.uint8, tf.int8, tf.int32, tf.int64),
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.uint32, tf.uint64),
    *(tf.as_dtype("float8_e5m2"), tf.as_dtype("float8_e4m3fn")),
)
OPS = (
    (keras_hvd.Sum, lambda given: sum(given)),
    (keras_hvd.Average, lambda given: np.trunc(sum(given) / len(given))),
    (keras_hvd.Min, lambda given: np.minimum.reduce(given)),
    (keras_hvd.Max, lambda given: np.maximum.reduce(given)),
    (keras_hvd.Product, lambda given: np.multiply.reduce(given)),
)


def check_device(kind: str) -> None:
    """One GPU, that of the local rank, which takes memory as it needs it."""
    if kind != "GPU":
        return
    every = tf.config.list_physical_devices("GPU")
    (visible,) = tf.config.get_visible_devices("GPU")
    assert visible == every[keras_hvd.local_rank() % len(every)]
    assert tf.config.experimental.get_memory_growth(visible) is True


def given(rank: int, dtype: tf.DType, rows: int) -> np.ndarray:
    """A rank's input: multiples of the number of ranks, at most 8 of all ranks.

    So averages are whole, and the sum of any ranks is a number of float8, in any order
    in which NCCL adds and rounds.
    """
    size = keras_hvd.size()
    numbers = np.arange(3 * rows).reshape(rows, 3) + rank
    return (size * (numbers % (max(8 // size, 1) + 1))).astype(dtype.as_numpy_dtype)


def all_given(dtype: tf.DType, rows: list[int]) -> list[np.ndarray]:
    """The inputs of all ranks, as numbers that NumPy computes with."""
    return [
        given(rank, dtype, count).astype(np.float64) for rank, count in enumerate(rows)
    ]


def require(result: tf.Tensor, expected: np.ndarray, kind: str) -> None:
    """A result is right, and where its input was.

    TensorFlow itself keeps some types of whole numbers on the CPU.
    """
    if result.dtype.is_floating:
        assert kind in result.device, result.device
    np.testing.assert_array_equal(result.numpy().astype(np.float64), expected)


def collectives(dtype: tf.DType, how, kind: str) -> None:
    """Each of them once; `how` wraps a function of tensors for the call."""
    rank, size = keras_hvd.rank(), keras_hvd.size()
    same, uneven = [size + 1] * size, [each + 1 for each in range(size)]
    numbers = all_given(dtype, same)
    mine = tf.constant(given(rank, dtype, same[rank]))
    for op, reduce in OPS:
        if op is keras_hvd.Product and size > 2:
            continue  # more than uint8 holds
        call = how(
            lambda tensor, op=op: keras_hvd.allreduce(tensor, op=op, name=f"{op}")
        )
        require(call(mine), reduce(numbers), kind)
    call = how(lambda *tensors: keras_hvd.grouped_allreduce(tensors, op=keras_hvd.Sum))
    for result in call(mine, mine):
        require(result, sum(numbers), kind)
    own = tf.constant(given(rank, dtype, uneven[rank]))
    call = how(lambda tensor: keras_hvd.allgather(tensor, name="gather"))
    require(call(own), np.concatenate(all_given(dtype, uneven)), kind)
    call = how(lambda tensor: keras_hvd.broadcast(tensor, size - 1, name="broadcast"))
    require(call(mine), numbers[size - 1], kind)
    call = how(
        lambda tensor: keras_hvd.reducescatter(tensor, op=keras_hvd.Sum, name="scatter")
    )
    require(call(mine), np.array_split(sum(numbers), size)[rank], kind)
    call = how(lambda tensor: keras_hvd.alltoall(tensor, name="alltoall"))
    parts = [np.split(each[:size], size)[rank] for each in numbers]
    require(call(mine[:size]), np.concatenate(parts), kind)


def training(jit_compile: bool) -> None:
    """Gradients are averaged while backprop runs; weights stay equal on all ranks."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(keras_hvd.rank())
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
    )
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    x = np.random.normal(size=(64, 8)).astype(np.float32)
    history = model.fit(
        *(x, x.sum(1, keepdims=True)),
        batch_size=16,
        epochs=3,
        verbose=0,
        callbacks=[keras_hvd.callbacks.BroadcastGlobalVariables(0)],
    )
    losses = history.history["loss"]
    assert losses[-1] < losses[0]
    for weights in model.get_weights():
        every = keras_hvd.allgather_object(weights)
        assert all((each == every[0]).all() for each in every)


def main() -> None:
    kind = sys.argv[1]
    # It warns of functions that are made anew each time, as they are here.
    tf.get_logger().setLevel("ERROR")
    keras_hvd.init()
    check_device(kind)
    with tf.device(f"{kind}:0"):
        for dtype in DTYPES:
            collectives(dtype, lambda function: function, kind)
            collectives(dtype, tf.function, kind)
        for compiled in (False, True):
            training(compiled)
    print(f"rank {keras_hvd.rank()} of {keras_hvd.size()} has passed")


if __name__ == "__main__":
    main()
