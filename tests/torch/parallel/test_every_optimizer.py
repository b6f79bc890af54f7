"""Every optimizer of Keras: N ranks train as one process does on the same batches."""

import zlib
from typing import Any

import keras
import numpy as np
import pytest
from keras_optimizers import EMA, NAMES, RATE, optimizer

import keras_hvd

STEPS, ROWS = 50, 12
# A gradient near zero has another sign in another order of summation, and theirs is a
# step of full length.
OF_SIGNS = {"Lion", "Muon"}


def model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(8, activation="tanh"),
            layers.Dense(3),
        ]
    )


def rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    inputs = random.standard_normal((STEPS * ROWS, 8, 8, 2))
    return inputs, random.standard_normal((STEPS * ROWS, 3))


def my_part(array: np.ndarray) -> np.ndarray:
    """This rank's rows of every global batch."""
    batches = array.reshape(STEPS, keras_hvd.size(), -1, *array.shape[1:])
    return batches[:, keras_hvd.rank()].reshape(-1, *array.shape[1:])


def trained(optimizer: Any, is_alone: bool) -> list[np.ndarray]:
    """The weights after all steps; of one process on whole batches, or of all ranks."""
    keras.utils.set_random_seed(3)
    network = model()
    inputs, targets = rows()
    callbacks = []
    if not is_alone:
        inputs, targets = my_part(inputs), my_part(targets)
        optimizer = keras_hvd.DistributedOptimizer(optimizer)
        callbacks = [keras_hvd.callbacks.BroadcastGlobalVariables(0)]
        # One process has the first rank's weights.
        if keras_hvd.rank() != 0:
            network.set_weights([each + 1 for each in network.get_weights()])
    network.compile(optimizer, "mse")
    network.fit(
        inputs,
        targets,
        batch_size=len(inputs) // STEPS,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return network.get_weights()


def require_as_alone(make, dtype: str = "float32", tolerance: float = 1e-5) -> None:
    keras.config.set_floatx(dtype)
    try:
        keras.utils.set_random_seed(3)
        start = model().get_weights()
        alone = trained(make(), is_alone=True)
        together = trained(make(), is_alone=False)
    finally:
        keras.config.set_floatx("float32")
    assert max(np.abs(a - b).max() for a, b in zip(alone, start)) > 1e-3
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=tolerance)
    checksum = zlib.crc32(b"".join(each.tobytes() for each in together))
    assert len({*keras_hvd.allgather_object(checksum)}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_one_process(name, size):
    dtype = "float64" if name in OF_SIGNS else "float32"
    require_as_alone(lambda: optimizer(name), dtype)


ARGUMENTS = {
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "ema": EMA,
    "accumulation": {"gradient_accumulation_steps": 2},
    "loss scale": {"loss_scale_factor": 128.0},
    "all": {
        "global_clipnorm": 0.1,
        "weight_decay": 0.01,
        "gradient_accumulation_steps": 2,
        **EMA,
    },
}


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("case", sorted(ARGUMENTS))
def test_trains_as_one_process_with(kind, case, size):
    made = getattr(keras.optimizers, kind)
    require_as_alone(lambda: made(RATE, **ARGUMENTS[case]))


def scaled(scale):
    inner = keras.optimizers.SGD(RATE)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale)


def test_trains_as_one_process_in_a_loss_scale_optimizer(size):
    require_as_alone(lambda: scaled(8.0))


def test_trains_as_one_process_in_float16(size):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        # A gradient of few rows may be infinite at a scale where that of all is not.
        require_as_alone(lambda: scaled(64.0), tolerance=1e-3)
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(("accumulated", "updates"), [(1, STEPS), (2, STEPS // 2)])
def test_reduces_once_for_each_update(accumulated, updates, size, groups):
    steps = accumulated if accumulated > 1 else None
    trained(
        keras.optimizers.SGD(RATE, gradient_accumulation_steps=steps),
        is_alone=False,
    )
    assert len(groups) == updates
