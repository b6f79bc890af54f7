"""The same training as in digits.py, as a user of `tf.distribute` writes it.

khvdrun -np 2 python examples/strategy.py

Every rank gives `fit` all of the data, and takes its rows of each batch.
"""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_hvd

keras_hvd.init()
keras.utils.set_random_seed(1)

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1) / 16
x_train, x_test, y_train, y_test = train_test_split(
    images, labels, test_size=0.2, stratify=labels, random_state=0
)

with keras_hvd.Strategy().scope():
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
        optimizer=keras.optimizers.Adam(0.002),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )

# 64 rows over all ranks.
model.fit(x_train, y_train, batch_size=64, epochs=10, validation_split=0.1)
_, accuracy = model.evaluate(x_test, y_test)
predicted = model.predict(x_test).argmax(-1)
if keras_hvd.rank() == 0:
    print(f"Test accuracy: {accuracy:.2%}")
    print(f"Of the predictions right: {(predicted == y_test).mean():.2%}")
