"""N ranks with batches of B train to the weights of one process with batches of N x B.

The models are smooth (tanh, average pooling), because a ReLU or a maximum may go the
other way for a difference in the last bit.
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import pytest

import keras_hvd
from keras_hvd.callbacks import BroadcastGlobalVariables

STEPS = 50
BATCH_OF_RANK = 8


def convolutional() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(4, 5, strides=2, activation="tanh"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Conv2D(8, 3, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def with_embedding() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Cropping2D((13, 0)),
            keras.layers.Flatten(),
            keras.layers.Rescaling(30),
            keras.layers.Discretization(bin_boundaries=list(range(30))),
            keras.layers.Embedding(31, 4),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(10),
        ]
    )


def several_optimizers() -> keras.optimizers.Optimizer:
    by_path = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    by_path[".*conv2d.*"] = keras.optimizers.Adam(0.003)
    return keras.optimizers.MultiOptimizer(by_path)


@dataclasses.dataclass
class Case:
    optimizer: Callable[[], keras.optimizers.Optimizer]
    model: Callable[[], keras.Model] = convolutional
    policy: str = "float32"
    tolerance: float = 1e-5


CASES = {
    "sgd": Case(lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
    "adam": Case(lambda: keras.optimizers.Adam(0.003)),
    "global_clipnorm": Case(lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.3)),
    "clipvalue": Case(lambda: keras.optimizers.SGD(0.1, clipvalue=0.01)),
    "weight_decay_and_ema": Case(
        lambda: keras.optimizers.SGD(
            0.1,
            weight_decay=0.01,
            use_ema=True,
            ema_momentum=0.9,
            ema_overwrite_frequency=20,
        )
    ),
    "gradient_accumulation": Case(
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    ),
    "multi_optimizer": Case(several_optimizers),
    "embedding": Case(lambda: keras.optimizers.SGD(1.0), with_embedding),
    "mixed_float16": Case(
        lambda: keras.optimizers.SGD(0.1), policy="mixed_float16", tolerance=1e-3
    ),
}


compiled_or_not = pytest.mark.parametrize(
    "xla",
    [
        pytest.param(False, id=""),
        pytest.param(True, id="jit_compile", marks=pytest.mark.needs_xla),
    ],
)


def train(
    case: Case,
    seed: int,
    wrap: Callable,
    x: np.ndarray,
    y: np.ndarray,
    batch: int,
    xla: bool = False,
) -> keras.Model:
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(case.policy)
    try:
        model = case.model()
        model.compile(
            wrap(case.optimizer()),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=xla,
        )
    finally:
        keras.config.set_dtype_policy("float32")
    callbacks = [BroadcastGlobalVariables(0)] if wrap is not plain else []
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=callbacks)
    return model


def plain(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return optimizer


@pytest.fixture(scope="session")
def data(images, size):
    """The images of all steps; they come round again if there are fewer."""
    x, y = images
    wanted = np.arange(STEPS * BATCH_OF_RANK * size) % len(x)
    return x[wanted], y[wanted]


@pytest.fixture(scope="session")
def reference(data, rank, size):
    """The weights that one process trains, for each case; ranks share the work."""
    trained = {
        name: train(case, 7, plain, *data, BATCH_OF_RANK * size).get_weights()
        for i, (name, case) in enumerate(CASES.items())
        if i % size == rank
    }
    return {
        name: weights
        for of_rank in keras_hvd.allgather_object(trained)
        for name, weights in of_rank.items()
    }


@pytest.fixture
def train_distributed(data, rank, part_of_batches):
    def train_case(case: Case, xla: bool) -> keras.Model:
        mine = [part_of_batches(rows, BATCH_OF_RANK) for rows in data]
        # Only rank 0 starts from the reference's weights.
        wrap = keras_hvd.DistributedOptimizer
        return train(case, 7 + rank, wrap, *mine, BATCH_OF_RANK, xla)

    return train_case


@compiled_or_not
@pytest.mark.parametrize("name", CASES)
def test_weights(
    name, xla, reference, train_distributed, difference, equal_on_all_ranks
):
    model = train_distributed(CASES[name], xla)
    weights = model.get_weights()
    assert difference(weights, reference[name]) < CASES[name].tolerance
    assert equal_on_all_ranks(weights)
    assert equal_on_all_ranks([each.numpy() for each in model.optimizer.variables])


@compiled_or_not
def test_can_fail(
    xla, reference, train_distributed, difference, equal_on_all_ranks, monkeypatch, size
):
    """Without the reduction, neither of the two comparisons holds."""
    if size == 1:
        pytest.skip("one rank has nothing to reduce")
    monkeypatch.setattr(
        "keras_hvd.backends.tensorflow.gradients.reduction.reduce_buckets",
        lambda reduction, buckets, *others: buckets,
    )
    weights = train_distributed(CASES["sgd"], xla).get_weights()
    assert difference(weights, reference["sgd"]) > 100 * CASES["sgd"].tolerance
    assert not equal_on_all_ranks(weights)
