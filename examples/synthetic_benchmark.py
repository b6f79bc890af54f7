"""Measures how many images a second a Keras model trains on, with random data.

khvdrun -np 2 python examples/synthetic_benchmark.py --model ResNet50
khvdrun -np 2 python examples/synthetic_benchmark.py --tape
"""

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import keras_hvd

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
add = parser.add_argument
add("--model", default="ResNet50", help="one of keras.applications (%(default)s)")
add("--image-size", type=int, default=224, help="of a side, in pixels (%(default)s)")
add("--batch-size", type=int, default=32, help="images of a rank (%(default)s)")
add("--num-warmup-batches", type=int, default=10, help="not measured (%(default)s)")
add("--num-batches-per-iter", type=int, default=10, help="a measurement (%(default)s)")
add("--num-iters", type=int, default=10, help="measurements (%(default)s)")
add("--fp16-allreduce", action="store_true", help="gradients travel as float16")
add("--use-adasum", action="store_true", help="Adasum in the average's place")
add("--jit-compile", action="store_true", help="compile the step with XLA")
add("--tape", action="store_true", help="a loop with a tape in the place of fit")
arguments = parser.parse_args()

keras_hvd.init()
size = keras_hvd.size()

model = getattr(keras.applications, arguments.model)(
    weights=None, input_shape=(arguments.image_size, arguments.image_size, 3)
)
optimizer = keras.optimizers.SGD(0.01)
reduction = {
    "compression": keras_hvd.Compression.fp16
    if arguments.fp16_allreduce
    else keras_hvd.Compression.none,
    "op": keras_hvd.Adasum if arguments.use_adasum else keras_hvd.Average,
}

# One batch again and again, so that no time goes into making data.
generator = np.random.default_rng(keras_hvd.rank())
images = generator.random((arguments.batch_size, *model.input_shape[1:]), "float32")
labels = generator.integers(model.output_shape[-1], size=arguments.batch_size)
batch = tf.data.Dataset.from_tensors((images, labels)).cache().repeat()


def report(text: str) -> None:
    if keras_hvd.rank() == 0:
        print(text, flush=True)


def rate_since(begin: float, iteration: int) -> float:
    seconds = time.perf_counter() - begin
    rate = arguments.batch_size * arguments.num_batches_per_iter / seconds
    report(f"Iteration {iteration}: {rate:.1f} images/s per rank")
    return rate


class Rates(keras.callbacks.Callback):
    """How many images a second this rank trained on, for each measurement."""

    def __init__(self):
        super().__init__()
        self.measured: list[float] = []
        self._begin = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self._begin = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.measured.append(rate_since(self._begin, epoch))


def measure_fit() -> list[float]:
    model.compile(
        keras_hvd.DistributedOptimizer(optimizer, **reduction),
        "sparse_categorical_crossentropy",
        jit_compile=arguments.jit_compile,
    )
    model.fit(
        batch,
        steps_per_epoch=arguments.num_warmup_batches,
        callbacks=[keras_hvd.callbacks.BroadcastGlobalVariables(0)],
        shuffle=False,
        verbose=0,
    )
    rates = Rates()
    model.fit(
        batch,
        steps_per_epoch=arguments.num_batches_per_iter,
        epochs=arguments.num_iters,
        callbacks=[rates],
        shuffle=False,
        verbose=0,
    )
    return rates.measured


def measure_tape() -> list[float]:
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    optimizer.build(model.trainable_variables)
    keras_hvd.broadcast_variables(model.variables, root_rank=0)
    keras_hvd.broadcast_variables(optimizer.variables, root_rank=0)

    @tf.function(jit_compile=arguments.jit_compile)
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = keras_hvd.DistributedGradientTape(tape, **reduction)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def train(batches: int) -> None:
        for images, labels in batch.take(batches):
            loss = train_step(images, labels)
        # A GPU has ended the steps when it has this.
        loss.numpy()

    train(arguments.num_warmup_batches)
    rates = []
    for iteration in range(arguments.num_iters):
        begin = time.perf_counter()
        train(arguments.num_batches_per_iter)
        rates.append(rate_since(begin, iteration))
    return rates


report(f"Model: {arguments.model}, batch size: {arguments.batch_size}, ranks: {size}")
rates = measure_tape() if arguments.tape else measure_fit()
mean, deviation = np.mean(rates), 1.96 * np.std(rates)
report(f"Images/s per rank: {mean:.1f} +- {deviation:.1f}")
report(f"Total images/s on {size} rank(s): {size * mean:.1f} +- {size * deviation:.1f}")
