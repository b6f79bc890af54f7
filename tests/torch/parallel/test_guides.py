"""The page's blocks: a metric over all ranks, and a loop that trains as fit does."""

import re
from pathlib import Path

import keras
import numpy as np
import torch

import keras_hvd

PAGE = Path(__file__).parents[3] / "docs" / "torch.md"


def made() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    model.compile(optimizer, "mse")
    return model


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_metric_of_the_page(rank, size):
    names = {"keras_hvd": keras_hvd, "right": torch.tensor(1.0 + rank), "total": 4}
    exec(blocks()[0], names)
    assert names["accuracy"] == (1 + (size - 1) / 2) / 4


def test_the_loop_of_the_page(rank, size):
    [_, block] = blocks()
    random = np.random.default_rng(rank)
    inputs = random.standard_normal((8, 4)).astype("float32")
    targets = random.standard_normal((8, 1)).astype("float32")
    fitted, looped = made(), made()
    fitted.fit(inputs, targets, epochs=3, verbose=0)
    names = {
        "torch": torch,
        "model": looped,
        "optimizer": looped.optimizer,
        "inputs": torch.from_numpy(inputs),
        "targets": torch.from_numpy(targets),
    }
    for _ in range(3):
        exec(block, names)
    for one, other in zip(fitted.get_weights(), looped.get_weights()):
        np.testing.assert_allclose(one, other, atol=1e-6)
    of_ranks = keras_hvd.allgather_object(looped.get_weights()[0].tolist())
    assert of_ranks[0] == of_ranks[1]
