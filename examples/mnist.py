"""Recognizes handwritten digits: MNIST.

khvdrun -np 2 python examples/mnist.py --data mnist.npz
"""

import argparse

import keras
import numpy as np

import keras_hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", metavar="PATH.npz", help="default: Keras downloads it")
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()

keras_hvd.init()
rank, size = keras_hvd.rank(), keras_hvd.size()
keras.utils.set_random_seed(1 + rank)

if arguments.data:
    with np.load(arguments.data) as data:
        x_train, y_train = data["x_train"], data["y_train"]
        x_test, y_test = data["x_test"], data["y_test"]
else:
    # A file for each rank, so that no two write to the same.
    (x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data(
        f"mnist-{rank}.npz"
    )
# Each rank trains on a part of the images; the parts are equally large.
x_train, y_train = keras_hvd.data.part(x_train, y_train)
x_test, y_test = keras_hvd.data.part(x_test, y_test, drop_remainder=False)

model = keras.Sequential(
    [
        keras.Input((28, 28)),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Reshape((28, 28, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
# The batch of all ranks together is `size` times larger, and so may be the steps.
learning_rate = 0.001 * size
model.compile(
    optimizer=keras_hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate)),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    jit_compile=False,
)
model.fit(
    x_train,
    y_train,
    batch_size=64,
    epochs=arguments.epochs,
    validation_data=(x_test, y_test),
    callbacks=[
        keras_hvd.callbacks.BroadcastGlobalVariables(0),
        # Before the callbacks that read its averages.
        keras_hvd.callbacks.MetricAverage(),
        keras_hvd.callbacks.LearningRateWarmup(learning_rate, warmup_epochs=1),
        keras_hvd.callbacks.LearningRateSchedule(
            learning_rate, multiplier=lambda epoch: 0.8 ** (epoch - 1), start_epoch=1
        ),
        keras_hvd.callbacks.BestModelCheckpoint(filepath="mnist.keras"),
        keras.callbacks.CSVLogger("mnist.csv"),
    ],
)
# The best model of all epochs, not the last one; it trains on where it was saved.
model = keras_hvd.load_model("mnist.keras")
_, accuracy = keras_hvd.evaluate(model, x_test, y_test)
if rank == 0:
    print(f"Test accuracy: {accuracy:.2%}")
