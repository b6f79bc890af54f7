"""A rank of the tests through torch: collectives and a training on one device.

`python torch_rank.py DEVICE`, where DEVICE is cuda or cpu, with KERAS_BACKEND=torch and
KERAS_TORCH_DEVICE=DEVICE.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import torch

import keras_hvd

TYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
OPS = (
    (keras_hvd.Sum, lambda given: sum(given)),
    (keras_hvd.Average, lambda given: np.trunc(sum(given) / len(given))),
    (keras_hvd.Min, lambda given: np.minimum.reduce(given)),
    (keras_hvd.Max, lambda given: np.maximum.reduce(given)),
)


def given(rank: int, rows: int) -> np.ndarray:
    """A rank's input: multiples of the number of ranks, so that averages are whole."""
    size = keras_hvd.size()
    numbers = np.arange(3 * rows).reshape(rows, 3) + rank
    return size * (numbers % (max(8 // size, 1) + 1))


def require(result: torch.Tensor, expected: np.ndarray, device: str) -> None:
    """A result is right, and where its input was."""
    assert result.device.type == device, result.device
    np.testing.assert_array_equal(result.double().cpu().numpy(), expected)


def collectives(kind: torch.dtype, device: str) -> None:
    """Each of them once."""
    rank, size = keras_hvd.rank(), keras_hvd.size()
    numbers = [given(each, size + 1) for each in range(size)]
    mine = torch.tensor(numbers[rank], dtype=kind, device=device)
    for op, reduce in OPS:
        require(keras_hvd.allreduce(mine, op=op), reduce(numbers), device)
    first, second = keras_hvd.grouped_allreduce([mine, mine.T], op=keras_hvd.Sum)
    require(first, sum(numbers), device)
    require(second, sum(numbers).T, device)
    uneven = [given(each, each + 1) for each in range(size)]
    own = torch.tensor(uneven[rank], dtype=kind, device=device)
    require(keras_hvd.allgather(own), np.concatenate(uneven), device)
    require(keras_hvd.broadcast(mine, size - 1), numbers[size - 1], device)


def trained(x: np.ndarray, batch: int, optimizer: keras.Optimizer) -> list[np.ndarray]:
    """The weights after three epochs."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse")
    targets = x.sum(1, keepdims=True)
    model.fit(x, targets, batch_size=batch, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


def training() -> None:
    """The weights are those of one process, and the same on all ranks."""
    rank, size = keras_hvd.rank(), keras_hvd.size()
    x = np.random.default_rng(0).normal(size=(16 * size, 8)).astype(np.float32)
    alone = trained(x, 8 * size, keras.optimizers.Adam(0.01))
    # Each global batch has the same rows as one process' batch.
    mine = x.reshape(2, size, 8, 8)[:, rank].reshape(16, 8)
    adam = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    together = trained(mine, 8, adam)
    for one, own in zip(alone, together, strict=True):
        np.testing.assert_allclose(own, one, rtol=0, atol=1e-5)
        every = keras_hvd.allgather_object(own)
        assert all((each == every[0]).all() for each in every)


def main() -> None:
    device = sys.argv[1]
    keras_hvd.init()
    if device == "cuda":
        own = keras_hvd.local_rank() % torch.cuda.device_count()
        assert torch.cuda.current_device() == own
    for kind in TYPES:
        collectives(kind, device)
    training()
    print(f"rank {keras_hvd.rank()} of {keras_hvd.size()} has passed")


if __name__ == "__main__":
    main()
