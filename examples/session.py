"""Trains in a graph and a session of TensorFlow 1, as scripts older than Keras 3 do.

Started again in the same folder, it goes on from the last checkpoint.

khvdrun -np 2 python examples/session.py
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_hvd

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--steps", type=int, default=600, help="of one process")
arguments = parser.parse_args()

v1 = tf.compat.v1
v1.disable_eager_execution()

keras_hvd.init()
rank, size = keras_hvd.rank(), keras_hvd.size()
v1.set_random_seed(1 + rank)

images, labels = load_digits(return_X_y=True)
images = images.astype("float32") / 16
own = np.arange(rank, len(images), size)
random = np.random.default_rng(1 + rank)


def dense(inputs: tf.Tensor, units: int, name: str) -> tf.Tensor:
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", (inputs.shape[1], units))
        bias = v1.get_variable("bias", units, initializer=v1.zeros_initializer())
    return inputs @ kernel + bias


image = v1.placeholder(tf.float32, (None, 64))
label = v1.placeholder(tf.int64, (None,))
logits = dense(tf.nn.relu(dense(image, 64, "hidden")), 10, "output")
loss = tf.reduce_mean(
    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits)
)
mean_loss = keras_hvd.allreduce(loss)

# Where Horovod wraps the optimizer, the gradients are averaged before it has them.
optimizer = v1.train.AdamOptimizer(0.001 * size)
gradients, variables = zip(*optimizer.compute_gradients(loss))
gradients = keras_hvd.grouped_allreduce(list(gradients))
step = v1.train.get_or_create_global_step()
# Read before the update, which would otherwise run at the same time.
steps_made = step.read_value()
with tf.control_dependencies([steps_made]):
    train = optimizer.apply_gradients(zip(gradients, variables), global_step=step)

# Every rank starts from rank 0's variables; those may come from its checkpoint.
hooks = [
    keras_hvd.BroadcastGlobalVariablesHook(0),
    v1.train.StopAtStepHook(last_step=arguments.steps // size),
]
folder = "checkpoints" if rank == 0 else None
with v1.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks) as session:
    while not session.should_stop():
        batch = random.choice(own, 32)
        feed = {image: images[batch], label: labels[batch]}
        _, now, batch_loss = session.run([train, steps_made, mean_loss], feed)
        if rank == 0 and now % 50 == 0:
            print(f"Step {now}: loss {batch_loss:.4f} over {size} rank(s)")
