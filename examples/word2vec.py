"""Learns word vectors: embeddings whose gradients are sparse.

A step touches a few of many rows; only those travel, not the whole table.

khvdrun -np 2 python examples/word2vec.py
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

import keras_hvd

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--text", metavar="FILE", help="default: made-up sentences")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--batch-size", type=int, default=128, help="pairs of a rank")
arguments = parser.parse_args()

WINDOW = 2  # words on each side that a word is to predict
NEGATIVES = 8  # random words a pair is told from
DIMENSIONS = 32

keras_hvd.init()
rank, size = keras_hvd.rank(), keras_hvd.size()
keras.utils.set_random_seed(1 + rank)
random = np.random.default_rng(1 + rank)


def made_up_words() -> list[str]:
    """Sentences in which an animal eats its food and a vehicle burns its fuel."""
    pairs = {"cow": "grass", "cat": "mice", "owl": "mice", "horse": "grass"}
    fuels = {"truck": "diesel", "plane": "kerosene", "bus": "diesel", "jet": "kerosene"}
    sentences = [f"the {animal} eats {food}" for animal, food in pairs.items()]
    sentences += [f"the {vehicle} burns {fuel}" for vehicle, fuel in fuels.items()]
    order = np.random.default_rng(0).integers(len(sentences), size=5000)
    return " ".join(sentences[i] for i in order).split()


if arguments.text:
    with open(arguments.text, encoding="utf-8") as file:
        words = file.read().lower().split()
else:
    words = made_up_words()
vocabulary = sorted(set(words))
numbers = {word: number for number, word in enumerate(vocabulary)}
text = np.array([numbers[word] for word in words])
# Each rank reads a stretch of its own.
text = np.array_split(text, size)[rank]


def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words, a neighbour of each, and random words."""
    centers = random.integers(WINDOW, len(text) - WINDOW, size=arguments.batch_size)
    distances = random.integers(1, WINDOW + 1, size=arguments.batch_size)
    signs = random.choice([-1, 1], size=arguments.batch_size)
    negatives = random.choice(text, size=(arguments.batch_size, NEGATIVES))
    return text[centers], text[centers + signs * distances], negatives


def embedding(name: str) -> keras.layers.Embedding:
    layer = keras.layers.Embedding(len(vocabulary), DIMENSIONS, name=name)
    layer.build()
    return layer


inputs, outputs = embedding("inputs"), embedding("outputs")
variables = inputs.trainable_variables + outputs.trainable_variables
optimizer = keras.optimizers.SGD(2.0)
optimizer.build(variables)
keras_hvd.broadcast_variables(variables, root_rank=0)


@tf.function
def train_step(centers, neighbours, negatives):
    with tf.GradientTape() as tape:
        center = inputs(centers)[:, None]
        near = tf.reduce_sum(center * outputs(neighbours)[:, None], axis=-1)
        far = tf.reduce_sum(center * outputs(negatives), axis=-1)
        loss = tf.reduce_mean(
            tf.reduce_sum(tf.nn.softplus(-near), axis=-1)
            + tf.reduce_sum(tf.nn.softplus(far), axis=-1)
        )
    tape = keras_hvd.DistributedGradientTape(tape)
    optimizer.apply(tape.gradient(loss, variables), variables)
    return loss


for step in range(1, arguments.steps + 1):
    loss = train_step(*batch())
    if step % 500 == 0 and rank == 0:
        print(f"Step {step}: loss {loss:.3f}")

if rank == 0:
    vectors = inputs.embeddings.numpy()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for number in np.unique(text[:200])[:8]:
        closest = np.argsort(-vectors @ vectors[number])[1:4]
        near = ", ".join(vocabulary[i] for i in closest)
        print(f"Closest to {vocabulary[number]!r}: {near}")
