"""Trains with Adasum, which needs no other learning rate for more ranks.

Where gradients agree it averages them, where they are orthogonal it adds them up.

khvdrun -np 2 python examples/adasum.py
"""

import argparse

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_hvd

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--average", action="store_true", help="for comparison")
arguments = parser.parse_args()

keras_hvd.init()
rank, size = keras_hvd.rank(), keras_hvd.size()
keras.utils.set_random_seed(1 + rank)

images, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(
    images / 16, labels, test_size=0.2, stratify=labels, random_state=0
)
part = slice(rank, len(x_train) // size * size, size)

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
optimizer = keras_hvd.DistributedOptimizer(
    keras.optimizers.SGD(0.1),
    op=keras_hvd.Average if arguments.average else keras_hvd.Adasum,
)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    x_train[part],
    y_train[part],
    epochs=arguments.epochs,
    callbacks=[
        keras_hvd.callbacks.BroadcastGlobalVariables(0),
        keras_hvd.callbacks.MetricAverage(),
    ],
)
_, accuracy = keras_hvd.evaluate(model, x_test[rank::size], y_test[rank::size])
if rank == 0:
    print(f"Test accuracy: {accuracy:.2%}")
