"""Trains a model on Spark: `python examples/spark_train.py`, or by spark-submit."""

import keras
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

import keras_hvd


def train(epochs: int) -> dict[str, list[float]]:
    """Runs on each rank."""
    keras_hvd.init()
    keras.utils.set_random_seed(1)
    x, y = keras_hvd.data.part(*load_digits(return_X_y=True))
    model = keras.Sequential(
        [
            keras.layers.Rescaling(1 / 16),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.001))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        x,
        y,
        epochs=epochs,
        verbose=0,
        callbacks=[
            keras_hvd.callbacks.BroadcastGlobalVariables(0),
            keras_hvd.callbacks.MetricAverage(),
        ],
    )
    return history.history


if __name__ == "__main__":
    # Without the master, spark-submit names it.
    session = SparkSession.builder.master("local[2]").getOrCreate()
    history = keras_hvd.spark.run(train, args=(10,), num_proc=2)[0]
    print(f"accuracy: {history['accuracy'][-1]:.3f}")
    session.stop()
