"""A rank for the tests of trackers: trains under each of them, in the current folder.

It does what a script does: only rank 0 starts a run, and only its `fit` gets the
tracker's callback.
"""

from pathlib import Path

import keras
import mlflow
import mlflow.keras
import numpy as np
import wandb
from wandb.integration.keras import WandbMetricsLogger

import keras_hvd

ROWS, BATCH, EPOCHS = 64, 16, 3


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    return x, x.sum(axis=1, keepdims=True)


def model_with(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    dense = keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((4,)), dense])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(callbacks: list[keras.callbacks.Callback]) -> None:
    rank, size = keras_hvd.rank(), keras_hvd.size()
    x, y = (each[rank::size] for each in data())
    model = model_with(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.fit(
        x,
        y,
        batch_size=BATCH // size,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        validation_data=(x, y),
        callbacks=[
            keras_hvd.callbacks.BroadcastGlobalVariables(0),
            keras_hvd.callbacks.MetricAverage(),
            *callbacks,
        ],
    )


def with_tensorboard() -> None:
    # On all ranks: our callbacks keep others than rank 0 from writing.
    fit([keras.callbacks.TensorBoard("logs")])


def with_wandb() -> None:
    if keras_hvd.rank() != 0:
        fit([])
        return
    with wandb.init(project="trial", mode="offline", config={"rate": 0.1}):
        fit([WandbMetricsLogger()])


def with_mlflow(autolog: bool) -> None:
    mlflow.set_tracking_uri(Path("mlruns").absolute().as_uri())
    if keras_hvd.rank() != 0:
        fit([])
        return
    if autolog:
        mlflow.keras.autolog()
    with mlflow.start_run(run_name="autolog" if autolog else "callback"):
        fit([] if autolog else [mlflow.keras.MlflowCallback()])


if __name__ == "__main__":
    keras_hvd.init()
    with_tensorboard()
    with_wandb()
    with_mlflow(autolog=False)
    with_mlflow(autolog=True)
