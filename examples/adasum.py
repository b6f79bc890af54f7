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
rank = keras_hvd.rank()
keras.utils.set_random_seed(1 + rank)

images, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(
    images / 16, labels, test_size=0.2, stratify=labels, random_state=0
)
x_train, y_train = keras_hvd.data.part(x_train, y_train)
x_test, y_test = keras_hvd.data.part(x_test, y_test, drop_remainder=False)

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
    x_train,
    y_train,
    epochs=arguments.epochs,
    callbacks=[
        keras_hvd.callbacks.BroadcastGlobalVariables(0),
        keras_hvd.callbacks.MetricAverage(),
    ],
)
_, accuracy = keras_hvd.evaluate(model, x_test, y_test)
if rank == 0:
    print(f"Test accuracy: {accuracy:.2%}")
