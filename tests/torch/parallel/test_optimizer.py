"""DistributedOptimizer on torch: the gradients that it takes, and those it refuses."""

import keras
import numpy as np
import pytest
import torch
from torch import distributed as torch_distributed

import keras_hvd
from keras_hvd.exceptions import MismatchError


def distributed(**arguments):
    return keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **arguments)


def updated(grad, optimizer=None, start=0.0, name="weight"):
    """A variable after one update with a gradient."""
    optimizer = optimizer or distributed()
    variable = keras.Variable(np.full(tuple(grad.shape), start, "float32"), name=name)
    with torch.no_grad():
        optimizer.apply([grad], [variable])
    return variable.numpy()


def of_rank(rank, *shape):
    return torch.full(shape, float(rank + 1))


def test_averages_in_place(rank, size):
    grad = of_rank(rank, 2, 3)
    address = grad.data_ptr()
    mean = (size + 1) / 2
    np.testing.assert_array_equal(updated(grad), np.full((2, 3), -mean))
    assert grad.data_ptr() == address
    assert grad[0, 0] == mean


def test_adds_up(rank, size):
    total = size * (size + 1) / 2
    optimizer = distributed(op=keras_hvd.Sum)
    np.testing.assert_array_equal(updated(of_rank(rank, 2), optimizer), [-total] * 2)


def test_divides_before_and_after(rank, size):
    optimizer = distributed(gradient_predivide_factor=2.0)
    mean = (size + 1) / 2
    np.testing.assert_array_equal(updated(of_rank(rank, 2), optimizer), [-mean] * 2)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compresses(name, rank, size):
    optimizer = distributed(compression=getattr(keras_hvd.Compression, name))
    mean = (size + 1) / 2
    np.testing.assert_array_equal(updated(of_rank(rank, 2), optimizer), [-mean] * 2)


def test_reduces_by_adasum(rank, size):
    # Orthogonal gradients are added up, and equal ones averaged.
    grad = torch.zeros(size)
    grad[rank] = 1.0
    optimizer = distributed(op=keras_hvd.Adasum)
    np.testing.assert_allclose(updated(grad, optimizer), [-1.0] * size)


def test_keeps_local_gradients(rank, size):
    optimizer = distributed(scale_local_gradients=False)
    variable = keras.Variable(np.zeros(2, "float32"), name="own")
    optimizer.register_local_var(variable)
    with torch.no_grad():
        optimizer.apply([of_rank(rank, 2)], [variable])
    np.testing.assert_array_equal(variable.numpy(), [-rank - 1.0] * 2)


def test_ranks_without_shared_gradients_still_compare(rank, size):
    optimizer = distributed()
    variable = keras.Variable(np.zeros(2, "float32"), name="own")
    if rank == 0:
        optimizer.register_local_var(variable)
    with torch.no_grad(), pytest.raises(MismatchError):
        optimizer.apply([of_rank(rank, 2)], [variable])


def test_takes_gradients_of_any_strides(rank, size):
    # All ranks have these strides, as those of channels_last weights.
    values = np.arange(6.0, dtype="float32").reshape(2, 3) * (rank + 1)
    grad = torch.from_numpy(values.T.copy()).T
    assert not grad.is_contiguous()
    mean = np.arange(6.0).reshape(2, 3) * (size + 1) / 2
    np.testing.assert_array_equal(updated(grad), -mean)


def test_takes_gradients_with_gaps(rank, size):
    grad = of_rank(rank, 3, 4)[:, :2]
    np.testing.assert_array_equal(updated(grad), np.full((3, 2), -(size + 1) / 2))


def test_takes_one_gradient_of_two_variables(rank, size):
    # As torch.autograd.grad gives it. Of this size the engine copies none.
    length = 1 << 20
    variables = [keras.Variable(np.zeros(length, "float32"), name=n) for n in "ab"]
    grad = of_rank(rank, length)
    with torch.no_grad():
        distributed(op=keras_hvd.Sum).apply([grad, grad], variables)
    for each in variables:
        assert np.all(each.numpy() == -size * (size + 1) / 2)


def test_refuses_other_strides_on_one_rank(rank, size):
    grad = torch.ones(3, 2)
    grad = grad if rank else torch.ones(2, 3).T
    with pytest.raises(MismatchError, match="strides"):
        updated(grad)


def test_refuses_other_shapes_on_one_rank(rank, size):
    shapes = r"(?s)\[2\].*\[3\]|\[3\].*\[2\]"
    with pytest.raises(MismatchError, match=shapes):
        updated(of_rank(rank, 3 if rank else 2))


def test_refuses_a_gradient_that_one_rank_lacks(rank, size):
    optimizer = distributed()
    variables = [keras.Variable(np.zeros(2, "float32"), name=n) for n in "ab"]
    grads = [of_rank(rank, 2), of_rank(rank, 2) if rank else None]
    with torch.no_grad(), pytest.raises(MismatchError):
        optimizer.apply(grads, variables)


def test_sparse_gradients(rank, size):
    grad = torch.sparse_coo_tensor([[rank]], [[1.0, 1.0]], (size, 2))
    with pytest.raises(NotImplementedError, match="sparse_as_dense=True"):
        updated(grad)
    optimizer = distributed(sparse_as_dense=True)
    expected = np.full((size, 2), -1 / size, "float32")
    np.testing.assert_allclose(updated(grad, optimizer), expected)


def test_refuses_complex_gradients(size):
    with pytest.raises(NotImplementedError, match="complex64"):
        updated(torch.ones(2, dtype=torch.complex64))


def test_refuses_gradients_elsewhere(size):
    with pytest.raises(NotImplementedError, match="KERAS_TORCH_DEVICE=cpu"):
        updated(torch.ones(2, device="meta"))


def test_refuses_arrays(size):
    with pytest.raises(TypeError, match="must be a tensor of torch; got numpy.ndarray"):
        updated(np.ones(2))


def test_refuses_optimizers_of_torch(size):
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    with pytest.raises(TypeError, match="torch.optim.Adam. Use one of keras.optimizer"):
        keras_hvd.DistributedOptimizer(optimizer)


def test_refuses_optimizers_that_override_apply(size):
    class Own(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            for grad, variable in zip(grads, trainable_variables):
                variable.assign_sub(grad)

    optimizer = keras_hvd.DistributedOptimizer(Own(1.0))
    with pytest.raises(RuntimeError, match="of 1 gradients .* 0 were reduced"):
        updated(torch.ones(2), optimizer)


@pytest.mark.parametrize("version", ["3.15.1", "3.16.0"])
def test_refuses_to_reduce_what_keras_reduces(rank, size, version, monkeypatch):
    monkeypatch.setattr(keras, "__version__", version)
    store = torch_distributed.HashStore()
    torch_distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        if version == "3.15.1":
            assert updated(torch.full((2,), 2.0 * rank)).tolist() == [1.0 - size] * 2
        else:
            with pytest.raises(RuntimeError, match="would reduce twice"):
                updated(torch.ones(2))
    finally:
        torch_distributed.destroy_process_group()


def test_an_infinity_on_one_rank_skips_the_step_on_all(rank, size):
    inner = keras.optimizers.SGD(1.0)
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    )
    grad = torch.full((2,), float("inf") if rank else 4.0)
    np.testing.assert_array_equal(updated(grad, optimizer), [0.0, 0.0])
    assert float(optimizer.dynamic_scale) == 2.0


def test_a_frozen_or_unused_layer(rank, size):
    inputs = keras.Input((2,))
    frozen = keras.layers.Dense(2, trainable=False)
    outputs = keras.layers.Dense(1)(frozen(inputs))
    model = keras.Model(inputs, outputs)
    before = frozen.get_weights()
    model.compile(distributed(), "mse")
    model.fit(np.ones((4, 2)), np.zeros(4), verbose=0)
    for one, other in zip(before, frozen.get_weights()):
        np.testing.assert_array_equal(one, other)


def test_two_models_of_one_name(rank, size):
    for _ in range(2):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="m")
        model.compile(distributed(), "mse")
        model.fit(np.full((4, 2), rank), np.zeros(4), verbose=0)
        weights = keras_hvd.allgather_object(model.get_weights()[0].tolist())
        assert weights[0] == weights[1]


def test_a_plain_optimizer_is_refused(size):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    broadcast = keras_hvd.callbacks.BroadcastGlobalVariables(0)
    with pytest.raises(RuntimeError, match="its optimizer SGD 'sgd' is not distribute"):
        model.fit(np.ones((4, 2)), np.zeros(4), verbose=0, callbacks=[broadcast])
