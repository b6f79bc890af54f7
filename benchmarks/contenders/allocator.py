"""A rank of allocator.py: the time, page faults and memory of one workload."""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable
from pathlib import Path

import c_api
import numpy as np
import rank
import tensorflow as tf
from workloads import WORKLOADS

import keras_hvd
from keras_hvd import version

# A call, which may be given the number of calls before it.
Call = Callable[[int], object]


def main() -> None:
    parser = rank.parser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--timed-calls", required=True, help="timed_calls.c, compiled")
    options = parser.parse_args()
    keras_hvd.init()
    session = rank.Session(
        options.socket,
        keras_hvd.rank(),
        keras_hvd.size(),
        f"keras_hvd {version.__version__}, TensorFlow {tf.__version__}",
    )
    kind, _, size = options.workload.partition("/")
    if kind == "c_api":
        array = rank.buffer(int(size) << 20)
        seconds = c_api.Allreduce(options.timed_calls, kind, [array]).seconds
    else:
        call = KINDS[kind](*([int(size)] if size else []))
        seconds = functools.partial(timed, call)
    while (command := session.command()) is not None:
        before = faults()
        measured = seconds(command["repeats"])
        session.reply(
            seconds=measured,
            faults=(faults() - before) / len(measured),
            **memory(),
        )


def timed(call: Call, repeats: int) -> list[float]:
    """The times of `repeats` calls, each with a number of its own."""
    measured = []
    for number in range(repeats):
        begin = time.perf_counter()
        call(number)
        measured.append(time.perf_counter() - begin)
    return measured


def faults() -> int:
    """The page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def memory() -> dict[str, int]:
    """The resident memory of this process, now and at its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {
        name: int(fields[field].split()[0]) << 10
        for name, field in (("resident", "VmRSS"), ("peak", "VmHWM"))
    }


def allreduce(mebibytes: int) -> Call:
    """An argument of a function, and an allreduce of it."""
    given = tf.ones([mebibytes << 18])

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return keras_hvd.allreduce(x, op=keras_hvd.Sum, name="given")

    return lambda number: step(given)


def gradients() -> Call:
    """ResNet-50's gradients as arguments, and a grouped allreduce of them."""
    given = [tf.ones(shape) for shape in WORKLOADS["resnet50"]]

    @tf.function
    def step(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return keras_hvd.grouped_allreduce(tensors, op=keras_hvd.Sum, name="given")

    return lambda number: step(*given)


def elements() -> Call:
    """1,000 elements of a pipeline of small tensors, made by eight threads."""
    data = tf.data.Dataset.range(1_000_000_000).map(
        lambda x: tf.reduce_sum(tf.reshape(tf.range(4) * tf.cast(x, tf.int32), [2, 2])),
        num_parallel_calls=8,
        deterministic=False,
    )
    batches = iter(data.batch(1_000).prefetch(1))
    return lambda number: next(batches)


def cnn() -> Call:
    """A step of a network for MNIST, batch 128."""
    from training import cnn

    images = np.random.default_rng(0).random((128, 28, 28, 1), np.float32)
    return trained(cnn(), images, 10)


def mlp() -> Call:
    """A step of a network of 42 million parameters, batch 64."""
    import keras

    layers = [keras.layers.Dense(4096, activation="relu") for _ in range(3)]
    last = keras.layers.Dense(10, activation="softmax")
    model = keras.Sequential([keras.Input((2048,)), *layers, last])
    return trained(model, np.random.default_rng(0).random((64, 2048), np.float32), 10)


def embedding() -> Call:
    """A step of a table of 500,000 rows, of which 64 x 50 are used."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((50,), dtype="int32"),
            keras.layers.Embedding(500_000, 32),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    return trained(model, np.random.default_rng(0).integers(0, 500_000, (64, 50)), 10)


def transformer() -> Call:
    """A step of two layers of attention, with texts of another length each time."""
    import keras

    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(8192, 128)(tokens)
    for _ in range(2):
        x = keras.layers.LayerNormalization()(
            x + keras.layers.MultiHeadAttention(4, 32)(x, x)
        )
        y = keras.layers.Dense(512, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(128)(y))
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(tokens, keras.layers.Dense(10, activation="softmax")(x))
    rows = np.random.default_rng(0).integers(0, 8192, (16, 160))
    step = trained(model, rows, 10)
    return lambda number: step(number, 32 + 37 * number % 129)


def trained(model, rows: np.ndarray, classes: int) -> Call:
    """A step of a model's training with Adam on these rows, or their first columns."""
    import keras

    model.compile(
        keras_hvd.DistributedOptimizer(keras.optimizers.Adam()),
        "sparse_categorical_crossentropy",
    )
    signature = tf.TensorSpec([len(rows), *[None] * (rows.ndim - 1)], rows.dtype)
    labels = tf.constant(np.arange(len(rows)) % classes)

    @tf.function(input_signature=[signature])
    def step(x: tf.Tensor) -> None:
        x = tf.ensure_shape(x, [len(rows), *model.input_shape[1:]])
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, labels, model(x, training=True))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)

    return lambda number, columns=None: step(
        rows if columns is None else rows[:, :columns]
    )


KINDS = {
    each.__name__: each
    for each in (
        *(allreduce, gradients, elements),
        *(cnn, mlp, embedding, transformer),
    )
}

if __name__ == "__main__":
    main()
