"""In float64, where only the order of sums differs: one process' numbers to 1e-9.

Above all Keras' assignments besides updates, in `build`, `adapt` and `call`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers

GENERATOR = np.random.default_rng(5)
# The last batch, of 5, does not divide by 2, 3 or 4 ranks.
X = GENERATOR.standard_normal((50, 4, 3))
Y = GENERATOR.standard_normal((50, 1))


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def flat(*others: keras.layers.Layer) -> keras.Model:
    return keras.Sequential(
        [keras.Input((4, 3)), layers.Flatten(), *others, layers.Dense(1)]
    )


def trained(
    model: keras.Model, optimizer: Any = None, rows: int = 50, batch_size: int = 15
) -> dict[str, Any]:
    model.compile(optimizer or keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    history = model.fit(
        X[:rows], Y[:rows], batch_size, epochs=2, verbose=0, shuffle=False
    )
    state = [variable.numpy() for variable in model.variables]
    optimizer = [variable.numpy() for variable in model.optimizer.variables]
    return {"logs": history.history, "state": state, "optimizer": optimizer}


def spectral() -> dict[str, Any]:
    """Assigns the kernel and its singular vector in each call."""
    return trained(flat(layers.SpectralNormalization(layers.Dense(5), 2)))


def synchronized() -> dict[str, Any]:
    layer = layers.BatchNormalization(synchronized=True, momentum=0.5)
    return trained(flat(layers.Dense(5), layer))


def adapted(data: Callable[[np.ndarray], Any]) -> Callable[[], dict[str, Any]]:
    def run():
        normalization = layers.Normalization()
        normalization.adapt(data(X.reshape(50, 12)))
        bins = layers.Discretization(num_bins=4, output_mode="one_hot")
        bins.adapt(data(X.reshape(50, 12)))
        model = flat(normalization, bins, layers.Flatten())
        return {"bins": [*bins.bin_boundaries], **trained(model)}

    return run


def lookup() -> dict[str, Any]:
    """Counts the documents that a word is in."""
    words = layers.IntegerLookup(output_mode="tf_idf")
    words.adapt(np.abs(X[:, 0]).astype("int64"))
    numbers = layers.Lambda(lambda x: tf.cast(tf.abs(x[:, :3]), tf.int64))
    results = trained(flat(numbers, words))
    return {"weights": words.idf_weights.numpy(), **results}


def stateful() -> dict[str, Any]:
    """Each row of a batch goes on where that row of the last batch has ended."""
    rows = 12 // tf.distribute.get_strategy().num_replicas_in_sync
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(rows, 4, 3)),
            layers.LSTM(3, stateful=True),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    arguments = {"batch_size": 12, "verbose": 0, "shuffle": False}
    losses = [model.fit(X[:48], Y[:48], **arguments).history["loss"] for _ in range(2)]
    model.layers[0].reset_state()
    losses.append(model.evaluate(X[:48], Y[:48], 12, verbose=0))
    losses.append(model.train_on_batch(X[:12], Y[:12]))
    return {
        "losses": losses,
        "weights": model.get_weights(),
        "predictions": model.predict(X[:48], 12, verbose=0),
    }


def lora() -> dict[str, Any]:
    """A frozen int8 kernel, and two small ones that train."""
    dense = layers.Dense(5)
    model = flat(dense)
    dense.enable_lora(2)
    dense.lora_kernel_b.assign(np.linspace(-1, 1, 10).reshape(2, 5))
    dense.quantize("int8")
    return trained(model)


class Averaging(layers.Layer):
    """Keeps the mean of each batch, and a number that it assigns when it is built.

    The mean of the ranks' means is the batch's where they have equally many rows.
    """

    def build(self, shape):
        self.mean = self.add_weight(
            shape=(), initializer="zeros", trainable=False, aggregation="mean"
        )
        self.offset = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.offset.assign(0.25)

    def call(self, inputs):
        self.mean.assign(tf.reduce_mean(inputs))
        return inputs + self.offset


def averaging() -> dict[str, Any]:
    return trained(flat(Averaging()), rows=48, batch_size=12)


def averaging_without_shape() -> dict[str, Any]:
    model = keras.Sequential([layers.Flatten(), Averaging(), layers.Dense(1)])
    return trained(model, rows=48, batch_size=12)


def moving_averages() -> dict[str, Any]:
    optimizer = keras.optimizers.Adam(
        0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3
    )
    return trained(flat(layers.Dense(5)), optimizer)


def loss_scale() -> dict[str, Any]:
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=3
    )
    return trained(flat(layers.Dense(5)), optimizer)


def schedule_free(*shape: int) -> Callable[[], dict[str, Any]]:
    """Its `build` copies the weights.

    On one process it must be built before: Keras' `fit` would build it in the trace of
    a step that never runs, so that it would begin with zeros. Under a strategy it is
    built outside of it.
    """

    def run():
        begin = [keras.Input(shape)] if shape else []
        model = keras.Sequential([*begin, layers.Flatten(), layers.Dense(1)])
        optimizer = keras.optimizers.ScheduleFreeAdamW(0.05, warmup_steps=3)
        if not tf.distribute.has_strategy():
            model.build((None, 4, 3))
            optimizer.build(model.trainable_variables)
        return trained(model, optimizer)

    return run


def weighted() -> dict[str, Any]:
    """Rows, and the steps of their sequences, that count for nothing or for more."""
    model = keras.Sequential(
        [keras.Input((4, 3)), layers.Masking(), layers.LSTM(3, return_sequences=True)]
    )
    x = X * (np.arange(200).reshape(50, 4, 1) % 7 > np.arange(50)[:, None, None] % 5)
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    weights = np.linspace(0, 3, 200).reshape(50, 4)
    results = {}
    for name, each in {"mean": "mse", "weighted": loss}.items():
        model.compile(keras.optimizers.SGD(0.1), each)
        history = model.fit(x, X, 15, sample_weight=weights, verbose=0, shuffle=False)
        results[name] = [history.history["loss"], *model.get_weights()]
    return results


def float8() -> dict[str, Any]:
    """Assigns the largest numbers of a batch, as gradients of their scales."""
    dense = layers.Dense(5)
    model = flat(dense)
    dense.quantize("float8")
    return trained(model)


CASES = {
    "schedule_free": schedule_free(4, 3),
    "schedule_free_without_shape": schedule_free(),
    "weighted": weighted,
    "float8": float8,
    "spectral": spectral,
    "synchronized": synchronized,
    "adapted": adapted(lambda x: x),
    "adapted_to_dataset": adapted(
        lambda x: tf.data.Dataset.from_tensor_slices(x).batch(15)
    ),
    "lookup": lookup,
    "stateful": stateful,
    "lora": lora,
    "averaging": averaging,
    "averaging_without_shape": averaging_without_shape,
    "moving_averages": moving_averages,
    "loss_scale": loss_scale,
}


# The scales of an int8 kernel are float32.
TOLERANCES = {"lora": 1e-6}


@pytest.mark.parametrize("name", CASES)
def test_float64(name, both_ways, require_equal):
    results = both_ways(CASES[name], f"float64 {name}")
    require_equal(*results, TOLERANCES.get(name, 1e-9))
