"""Tensors on a GPU as the engine is given them. Other tests show the results."""

import keras
import numpy as np
import pytest
import torch

import keras_hvd
from keras_hvd.backends.torch import gpu


@pytest.fixture(autouse=True)
def needs_a_gpu(request) -> None:
    if not request.config.getoption("--stand-in-gpu"):
        pytest.skip("needs a GPU: --stand-in-gpu")


def updated(gradients: list[torch.Tensor]) -> list[np.ndarray]:
    """Variables of zeros after a step with these gradients."""
    variables = [
        keras.Variable(torch.zeros_like(each), name=f"weight_{number}")
        for number, each in enumerate(gradients)
    ]
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with torch.no_grad():
        optimizer.apply(gradients, variables)
    return [each.numpy() for each in variables]


def test_gradients_are_reduced_in_place_on_the_stream(rank, size, groups):
    gradients = [torch.full((3, 2), rank + 1.0), torch.full((5,), 2.0 * rank)]
    addresses = {each.data_ptr() for each in gradients}
    first, second = updated(gradients)
    [group] = groups
    assert {*group.addresses} == addresses
    assert group.stream == gpu.stream_of(gradients[0]).cuda_stream
    np.testing.assert_array_equal(first, np.full((3, 2), -(size + 1) / 2))
    np.testing.assert_array_equal(second, np.full(5, 1.0 - size))


def test_a_model_that_is_partly_on_the_host(rank, size, groups, monkeypatch):
    monkeypatch.setattr(gpu, "has", lambda tensor: tensor.dtype != torch.float64)
    on_host, on_gpu = updated(
        [torch.full((2,), 1.0 + rank, dtype=torch.float64), torch.full((2,), 2.0)]
    )
    streams = {each.name: each.stream for each in groups}
    assert streams["0"] is None
    assert streams["0/1"] is not None
    np.testing.assert_array_equal(on_host, np.full(2, -(size + 1) / 2))
    np.testing.assert_array_equal(on_gpu, np.full(2, -2.0))


def test_a_gradient_on_a_gpu_of_one_rank_alone(rank, monkeypatch):
    monkeypatch.setattr(gpu, "has", lambda tensor: rank == 0)
    with pytest.raises(keras_hvd.exceptions.MismatchError, match="GPU"):
        updated([torch.ones(2)])
