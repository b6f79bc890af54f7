"""Trains with a loop of its own: a gradient tape that reduces over all ranks.

khvdrun -np 2 python examples/custom_loop.py
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=500)
arguments = parser.parse_args()

keras_hvd.init()
rank, size = keras_hvd.rank(), keras_hvd.size()
keras.utils.set_random_seed(1 + rank)

images, labels = load_digits(return_X_y=True)
dataset = (
    tf.data.Dataset.from_tensor_slices((images.astype("float32") / 16, labels))
    .shard(size, rank)
    .shuffle(len(images))
    .repeat()
    .batch(32)
)
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(0.001 * size)
optimizer.build(model.trainable_variables)

# Every rank starts from rank 0's weights.
keras_hvd.broadcast_variables(model.variables, root_rank=0)
keras_hvd.broadcast_variables(optimizer.variables, root_rank=0)


@tf.function
def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = keras_hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


for step, (images, labels) in enumerate(dataset.take(arguments.steps // size), 1):
    loss = train_step(images, labels)
    if step % 50 == 0 and rank == 0:
        print(f"Step {step}: loss {loss:.4f}")

# Over all ranks, whose parts are not quite the same.
mean_loss = keras_hvd.allreduce(loss, name="loss")
if rank == 0:
    print(f"Last loss, averaged over {size} rank(s): {mean_loss:.4f}")
    model.save("digits.keras")
