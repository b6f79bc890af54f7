"""The training of launch/ranks/elastic.py, and what its ranks must have seen."""

from pathlib import Path

import keras
import numpy as np

SCRIPT = Path(__file__).parent / "launch" / "ranks" / "elastic.py"
STEPS, ROWS = 20, 12

COUNTS = {"COUNTS": "1"}
"""Of khvdrun alone: a process without TensorFlow starts in a tenth of the time."""


def weights_of_one_process():
    """The weights after the same training on one process of plain Keras."""
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        rng = np.random.default_rng(7)
        x, y = rng.normal(size=(STEPS * ROWS, 3)), rng.normal(size=(STEPS * ROWS, 1))
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        return [each.numpy() for each in model.weights]
    finally:
        keras.config.set_floatx(floatx)


def check(seen, one_process, sizes):
    assert [each["rank"] for each in seen] == [*range(sizes[-1])]
    for each in seen:
        assert each["sizes"] == sizes
        # Batches of each size have their own shape, once.
        assert each["traces"] <= 2
    check_weights(seen, one_process)


def check_weights(seen, one_process):
    for each in seen:
        assert each["step"] == STEPS
        for found, expected in zip(each["weights"], one_process, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
        assert each["weights"] == seen[0]["weights"]
