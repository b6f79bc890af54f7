"""`predict` under a strategy gives every row's prediction, in order, on every rank."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers


def nested() -> keras.Model:
    """Outputs in a structure, one of them the number of the row."""
    inputs = keras.Input((3,))
    hidden = layers.Dense(4, activation="tanh")(inputs)
    number = layers.Lambda(lambda x: x[:, :1])(inputs)
    return keras.Model(inputs, {"number": number, "others": [hidden, hidden * 2]})


def rows(count: int) -> np.ndarray:
    numbers = np.arange(count, dtype="float32")[:, None]
    return np.concatenate([numbers, np.sin(numbers), np.cos(numbers)], -1)


def predict(xla: bool) -> dict[str, Any]:
    model = nested()
    model.compile(jit_compile=xla, steps_per_execution=2)
    data = tf.data.Dataset.from_tensor_slices(rows(30)).batch(7)
    own = data
    if tf.distribute.has_strategy():
        own = tf.distribute.get_strategy().experimental_distribute_dataset(data)
    return {
        "distributed": model.predict(own, verbose=0),
        "arrays": model.predict(rows(50), batch_size=7, verbose=0),
        "dataset": model.predict(data, verbose=0),
        "some": model.predict(data, steps=2, verbose=0),
        "one_row": model.predict(rows(1), verbose=0),
        "batch": model.predict_on_batch(rows(11)),
        "row": model.predict_on_batch(rows(1)),
    }


@pytest.mark.parametrize(
    "xla", [False, pytest.param(True, marks=pytest.mark.needs_xla)]
)
def test_predict(xla, both_ways, require_equal):
    alone, here = both_ways(predict, "predict", xla)
    require_equal(alone, here)
    np.testing.assert_array_equal(here["arrays"]["number"][:, 0], np.arange(50))
    assert [len(each) for each in here["batch"]["others"]] == [11, 11]


def test_list_of_inputs(both_ways, require_equal):
    """Two arrays without targets are two inputs, no input and its target."""

    def run():
        inputs = [keras.Input((3,)), keras.Input((3,))]
        model = keras.Model(inputs, layers.Dense(2)(layers.Subtract()(inputs)))
        x = [rows(11), rows(11)[::-1]]
        return {"rows": model.predict(x, batch_size=4, verbose=0)}

    require_equal(*both_ways(run, "list_of_inputs"))


def test_eagerly(both_ways, require_equal):
    def run():
        model = nested()
        model.compile(run_eagerly=True)
        return {"rows": model.predict(rows(10), batch_size=7, verbose=0)}

    require_equal(*both_ways(run, "eagerly"))


def test_ragged(strategy, equal_on_all_ranks):
    """Outputs whose rows are of several lengths."""

    class Ragged(keras.Model):
        def call(self, inputs):
            lengths = tf.cast(inputs[:, 0], tf.int64) % 4
            return tf.RaggedTensor.from_row_lengths(
                tf.repeat(inputs[:, 1], lengths), lengths
            )

    with strategy.scope():
        model = Ragged()
    predicted = model.predict(rows(22), batch_size=5, verbose=0)
    expected = [[np.sin(i, dtype="float32")] * (i % 4) for i in range(22)]
    assert [len(each) for each in predicted.to_list()] == [i % 4 for i in range(22)]
    np.testing.assert_allclose(predicted.flat_values, np.concatenate(expected), 1e-5)
    assert equal_on_all_ranks([predicted.flat_values.numpy()])


def test_images(both_ways, require_equal, digits):
    """Convolutions; the last batch has one row."""

    def run(x):
        model = keras.Sequential(
            [
                keras.Input((14, 14, 1)),
                layers.Conv2D(2, 3, activation="tanh"),
                layers.AveragePooling2D(2),
                layers.Reshape((36, 2)),
                layers.LSTM(3),
            ]
        )
        return {"rows": model.predict(x[:33], batch_size=16, verbose=0)}

    require_equal(*both_ways(run, "images", digits[0]))
