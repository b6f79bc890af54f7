"""Recognizes handwritten digits (those that come with scikit-learn).

khvdrun -np 2 python examples/digits.py
"""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_hvd

keras_hvd.init()
rank = keras_hvd.rank()
keras.utils.set_random_seed(1 + rank)

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1) / 16
x_train, x_test, y_train, y_test = train_test_split(
    images, labels, test_size=0.2, stratify=labels, random_state=0
)
# Each rank trains on a part of the images; the parts are equally large.
x_train, y_train = keras_hvd.data.part(x_train, y_train)
x_test, y_test = keras_hvd.data.part(x_test, y_test, drop_remainder=False)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    optimizer=keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.002)),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    jit_compile=False,
)
model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=20,
    callbacks=[
        keras_hvd.callbacks.BroadcastGlobalVariables(0),
        keras_hvd.callbacks.MetricAverage(),
    ],
)
_, accuracy = keras_hvd.evaluate(model, x_test, y_test)
if rank == 0:
    print(f"Test accuracy: {accuracy:.2%}")
