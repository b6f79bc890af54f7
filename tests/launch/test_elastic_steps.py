"""Steps of many kinds give after a rank's death what one process computes."""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

SCRIPT = Path(__file__).parent / "ranks" / "elastic_steps.py"
STEPS, ROWS, LOST_AT, WARMUP = 10, 12, 6, 8
RNG = np.random.default_rng(7)
X, Y = RNG.normal(size=(STEPS, ROWS, 3)), RNG.normal(size=(STEPS, ROWS, 1))
WORDS = RNG.integers(0, 5, size=(STEPS, ROWS, 2))


def size_in(step):
    return 4 if step < LOST_AT else 3


def warmed_up(step):
    begin = 0.4 / size_in(step) * (1 + (size_in(step) - 1) / WARMUP)
    return begin + (0.4 - begin) * min(1, step / (WARMUP - 1))


def dense():
    return [keras.layers.Dense(1)]


def embedded():
    return [keras.layers.Embedding(5, 3), keras.layers.Flatten(), *dense()]


def normalized():
    return [keras.layers.BatchNormalization(), *dense()]


def one_process(layers, inputs, optimizer, factor=lambda step: 1.0, rate=None):
    """The weights after the same steps of plain Keras, whose gradients are dense."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(inputs.shape[2:]), *layers()])
    variables = model.trainable_variables
    optimizer.build(variables)
    for step in range(STEPS):
        if rate is not None:
            optimizer.learning_rate = rate(step)
        with tf.GradientTape() as tape:
            found = model(tf.constant(inputs[step]), training=True)
            loss = tf.reduce_mean(tf.square(found - Y[step]))
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, variables))
        optimizer.apply([each * factor(step) for each in gradients], variables)
    return [each.numpy() for each in model.weights]


@pytest.fixture
def expected():
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
    try:
        of_normalized = one_process(normalized, X, SGD(0.1))
        of_slices = one_process(embedded, WORDS, Adam(0.1))
        return {
            "slices": of_slices,
            "slices, compiled": of_slices,
            "compiled": one_process(dense, X, Adam(0.1)),
            "normalized": of_normalized,
            "normalized, compiled": of_normalized,
            "sum": one_process(dense, X, SGD(0.01), factor=size_in),
            "warmed up": one_process(dense, X, SGD(), rate=warmed_up),
        }
    finally:
        keras.config.set_floatx(floatx)


def gradients_of(rank, size):
    """Of allreduce, allgather, reducescatter, broadcast and alltoall."""
    factors = np.arange(size) + 1
    places = np.arange(size * 3).reshape(size, 3) + 1
    of_all_rows = np.arange(size * size * 3).reshape(size, size, 3) + 1
    return [
        places * factors.sum(),
        of_all_rows[rank] * factors.mean(),
        np.outer(factors, places[0]) * size,
        places * factors.mean() * (rank == 0),
        np.outer(factors, places[rank]),
    ]


def test_they_go_on_in_a_smaller_job(khvdrun, tmp_path, expected):
    """Nothing that was traced holds the number of ranks."""
    words = (sys.executable, SCRIPT, tmp_path)
    ended = khvdrun.run("-np", 4, "--min-np", 2, *words, timeout=240)
    assert ended.returncode == 0, ended.stderr
    seen = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
    assert sorted(each["rank"] for each in seen) == [0, 1, 2]
    for each in seen:
        assert each["weights"] == seen[0]["weights"]
        # A rank has batches of two shapes.
        assert {*each["traces"].values()} == {2}
        for name, weights in expected.items():
            # Keras computes the rate of a schedule in float32.
            tolerance = 1e-7 if name == "warmed up" else 1e-9
            for found, wanted in zip(each["weights"][name], weights, strict=True):
                np.testing.assert_allclose(
                    found, wanted, rtol=0, atol=tolerance, err_msg=name
                )
        for rank, size, gradients in each["gradients"]:
            for found, wanted in zip(gradients, gradients_of(rank, size), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)
        check_sets(each)
        # Three vectors have no pairs.
        refused = "NotImplementedError: allreduce: Adasum takes a number of ranks"
        assert each["adasum"]["3"].startswith(refused)


def check_sets(seen):
    """A set is added again in each job; a function of the job before is refused."""
    sums = {"4": [4.0], "3": [4.0]}
    if seen["rank"] == 1:
        # It has been rank 2.
        del sums["3"]
    elif seen["rank"] == 2:
        # It has been rank 3.
        del sums["4"]
    assert seen["sets"] == sums
    if len(sums) == 2:
        assert "it belonged to an earlier job of this process" in seen["old set"]
