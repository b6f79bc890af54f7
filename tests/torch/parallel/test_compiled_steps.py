"""Steps that torch.compile compiles reduce each update's gradients, as others do."""

import keras
import numpy as np
import pytest
import torch
from keras_optimizers import EMA, NAMES, RATE, optimizer

import keras_hvd
from keras_hvd.exceptions import MismatchError

STEPS = 6


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


@pytest.fixture
def only_traced(monkeypatch):
    """Makes torch.compile run what it traces as it is; the C++ compiler takes long."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda each: plain(each, backend="eager"))


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    random = np.random.default_rng([step, rank])
    shapes = (3, 2), (3,)
    return [torch.tensor(random.standard_normal(each)) for each in shapes]


def new_variables() -> list[keras.Variable]:
    return [keras.Variable(each.numpy()) for each in gradients(0, 0)]


def update_of(optimizer, variables):
    def update(grads):
        with torch.no_grad():
            optimizer.apply(grads, variables)

    return update


def trained_alone(optimizer, size):
    """What one process of plain Keras, not compiled, makes of the means."""
    variables = new_variables()
    update = update_of(optimizer, variables)
    for step in range(STEPS):
        of_ranks = zip(*(gradients(step, rank) for rank in range(size)))
        update([sum(each) / size for each in of_ranks])
    return [each.numpy() for each in variables]


def require_as_alone(make, distributed, rank, size):
    keras.config.set_floatx("float64")
    try:
        alone = trained_alone(make(), size)
        variables = new_variables()
        update = torch.compile(update_of(distributed(make()), variables))
        for step in range(STEPS):
            update(gradients(step, rank))
    finally:
        keras.config.set_floatx("float32")
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    together = [each.numpy() for each in variables]
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-12)
    [first, *others] = keras_hvd.allgather_object([each.tobytes() for each in together])
    assert all(each == first for each in others)


@pytest.mark.parametrize("name", NAMES)
def test_updates_as_one_process(name, rank, size, only_traced, groups):
    distributed = keras_hvd.DistributedOptimizer
    require_as_alone(lambda: optimizer(name), distributed, rank, size)
    assert len(groups) == STEPS


def test_updates_with_all_arguments(rank, size, only_traced, groups):
    arguments = {"global_clipnorm": 0.1, "weight_decay": 0.01, **EMA}

    def make():
        return keras.optimizers.Adam(RATE, gradient_accumulation_steps=2, **arguments)

    require_as_alone(make, keras_hvd.DistributedOptimizer, rank, size)
    assert len(groups) == STEPS / 2


def of_inner(scaling):
    """The optimizer as Keras makes it of a distributed one, under mixed_float16."""
    keras_hvd.DistributedOptimizer(scaling.inner_optimizer)
    return scaling


@pytest.mark.parametrize("distributed", [keras_hvd.DistributedOptimizer, of_inner])
def test_updates_with_loss_scaling(distributed, rank, size, only_traced, groups):
    def make():
        inner = keras.optimizers.Adam(RATE)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)

    require_as_alone(make, distributed, rank, size)
    assert len(groups) == STEPS


def test_a_function_that_was_compiled_before(rank, size, only_traced, groups):
    variable = keras.Variable(np.zeros(1, "float32"))
    optimizer = keras.optimizers.SGD(1.0)
    update = torch.compile(update_of(optimizer, [variable]))
    update([torch.ones(1)])
    assert not groups
    keras_hvd.DistributedOptimizer(optimizer)
    update([torch.full((1,), float(rank))])
    assert len(groups) == 1
    assert variable.numpy() == -1 - (size - 1) / 2


def test_ranks_that_differ(rank, size, only_traced):
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD())
    variable = keras.Variable(np.zeros(2 + rank, "float32"))
    update = torch.compile(update_of(optimizer, [variable]))
    with pytest.raises(MismatchError, match=r"\[2\]"):
        update([torch.ones(2 + rank)])


def test_synchronized_normalization(rank, size, only_traced):
    layer = keras_hvd.SyncBatchNormalization()
    layer.build((None, 3))
    rows = torch.arange(6.0).reshape(2, 3) * (rank + 1)
    for training in (True, False):
        compiled = torch.compile(lambda rows, t=training: layer(rows, training=t))
        found = compiled(rows)
        moving = [each.numpy() for each in layer.non_trainable_variables]
        ranks = keras_hvd.allgather_object(moving)
        assert all(np.array_equal(*each) for each in zip(ranks[0], ranks[1]))
    assert found.shape == rows.shape


def test_fit(rank, size, groups):
    """In full, with a last batch of fewer rows, weights of one rank, and a callback."""
    random = np.random.default_rng(7)
    rows, targets = random.standard_normal((size, 10, 4)), random.random((size, 10, 1))
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    alone = keras.models.clone_model(model)
    weights = keras_hvd.broadcast_object(model.get_weights())
    alone.set_weights(weights)
    alone.compile(keras.optimizers.Adam(RATE), "mse", metrics=["mae"])
    for _ in range(2):
        for batch in (slice(0, 4), slice(4, 8), slice(8, 10)):
            of_all = [
                each[:, batch].reshape(-1, each.shape[-1]) for each in (rows, targets)
            ]
            alone.train_on_batch(*of_all)
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(RATE))
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=True)
    callbacks = keras_hvd.callbacks
    history = model.fit(
        rows[rank],
        targets[rank],
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[callbacks.BroadcastGlobalVariables(0), callbacks.MetricAverage()],
    ).history
    assert len(groups) == 6
    for one, other in zip(alone.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)
    assert len({str(each) for each in keras_hvd.allgather_object(history)}) == 1
