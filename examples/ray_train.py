"""Trains a model on Ray: `python examples/ray_train.py`, on a node of the cluster."""

import keras
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from sklearn.datasets import load_digits

import keras_hvd


def build() -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Rescaling(1 / 16),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.001))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train() -> None:
    """Runs on each worker, and again after a failure."""
    keras_hvd.init()
    keras.utils.set_random_seed(1)
    x, y = keras_hvd.data.part(*load_digits(return_X_y=True))
    model, epoch = keras_hvd.ray.resume(build)
    model.fit(
        x,
        y,
        epochs=10,
        initial_epoch=epoch,
        verbose=0,
        callbacks=[
            keras_hvd.callbacks.BroadcastGlobalVariables(0),
            keras_hvd.callbacks.MetricAverage(),
            keras_hvd.ray.ReportCallback(),
        ],
    )


if __name__ == "__main__":
    ray.init()
    trainer = keras_hvd.ray.KerasTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    )
    result = trainer.fit()
    print(result.metrics, result.checkpoint)
