"""Trains on data that is not spread evenly: each rank joins when it has run out.

khvdrun -np 2 python examples/join.py
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
arguments = parser.parse_args()

keras_hvd.init()
rank, size = keras_hvd.rank(), keras_hvd.size()
keras.utils.set_random_seed(1 + rank)

# Rank 1 has twice as much as rank 0, rank 2 three times as much, and so on.
images, labels = load_digits(return_X_y=True)
shares = size * (size + 1) // 2
begin, end = (
    len(images) * before // shares
    for before in (rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2)
)
dataset = tf.data.Dataset.from_tensor_slices(
    (images[begin:end].astype("float32") / 16, labels[begin:end])
).shuffle(len(images))

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.001))
optimizer.build(model.trainable_variables)
keras_hvd.broadcast_variables(model.variables, root_rank=0)


@tf.function(reduce_retracing=True)
def train_step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


for epoch in range(1, arguments.epochs + 1):
    steps = 0
    for batch in dataset.batch(16, drop_remainder=True):
        train_step(*batch)
        steps += 1
    last = int(keras_hvd.join())
    # Ranks that joined early have missed the last updates.
    keras_hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=last)
    print(f"Epoch {epoch}: rank {rank} made {steps} steps; rank {last} joined last")
