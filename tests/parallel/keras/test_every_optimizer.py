"""Every optimizer of Keras: N ranks train as one process does on dense gradients.

One process of plain Keras squares repeated rows of a sparse gradient one by one in some
optimizers, so that its training with slices is no reference.
"""

import itertools
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd

RATE = 0.05
TOKENS, LENGTH, WIDTH = 13, 5, 4
# The rows divide by one to four ranks: a mean of unequal parts' means is no mean.
STEPS, ROWS = 3, 12
EMA = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}


class Case(NamedTuple):
    """The tolerance of a training, its way to run, and the optimizers' arguments."""

    tolerance: float
    run_eagerly: bool
    arguments: dict[str, Any]


CASES = {"float32": Case(1e-4, True, {}), "float64": Case(1e-9, False, EMA)}


class TokensAndPositions(keras.layers.Layer):
    """Embeddings of every sample's tokens, and of each position once."""

    def __init__(self):
        super().__init__(name="embeddings")
        self.tokens = keras.layers.Embedding(TOKENS, WIDTH, name="tokens")
        self.positions = keras.layers.Embedding(LENGTH, WIDTH, name="positions")

    def call(self, tokens):
        return self.tokens(tokens) + self.positions(keras.ops.arange(LENGTH))


def by_path(several, **arguments):
    optimizers = keras.optimizers
    by_path = optimizers.OptimizerMap(optimizers.SGD(RATE, momentum=0.9, **arguments))
    by_path[".*tokens.*"] = optimizers.Adam(RATE, **arguments)
    return several(by_path)


def scaled(scaling, **arguments):
    return scaling(keras.optimizers.Adam(RATE, **arguments), initial_scale=8.0)


# Functions that make the optimizers that need others.
MADE = {"LossScaleOptimizer": scaled, "MultiOptimizer": by_path}


def shipped():
    """The optimizers that this Keras has, by name."""
    plain = keras.optimizers.Optimizer
    return {
        name: kind
        for name, kind in vars(keras.optimizers).items()
        if isinstance(kind, type) and issubclass(kind, plain) and kind is not plain
    }


def make_optimizer(name, arguments):
    if name in MADE:
        return MADE[name](shipped()[name], **arguments)
    return shipped()[name](learning_rate=RATE, **arguments)


class OnDenseGradients(keras.Sequential):
    """The model that the reference trains."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled_loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, self.trainable_weights)
        dense = [tf.convert_to_tensor(each) for each in gradients]
        self.optimizer.apply(dense, self.trainable_weights)
        return {"loss": loss}


def make_model(kind, dtype, optimizer):
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = kind(
        [
            keras.Input((LENGTH,), dtype="int32"),
            TokensAndPositions(),
            layers.Flatten(),
            layers.Dense(3, activation="tanh", name="hidden"),
            layers.Dense(2, name="outputs"),
        ],
        name="model",
    )
    run_eagerly = CASES[dtype].run_eagerly
    model.compile(optimizer, keras.losses.MeanSquaredError(), run_eagerly=run_eagerly)
    # In the trace of a first step plain Keras loses the assignments of `build`.
    model.optimizer.build(model.trainable_variables)
    return model


def batches():
    """Tokens, most of them several times, and targets."""
    generator = np.random.default_rng(2)
    for _ in range(STEPS):
        tokens = np.minimum(generator.geometric(0.3, (ROWS, LENGTH)), TOKENS) - 1
        yield tokens.astype("int32"), generator.standard_normal((ROWS, 2))


def trained(model, first=0, ranks=1):
    """The variables after training: names, and arrays."""
    for x, y in batches():
        model.train_on_batch(x[first::ranks], y[first::ranks])
    variables = [*model.weights, *model.optimizer.variables]
    return [each.path for each in variables], [np.array(each) for each in variables]


def one_process(dtype, name):
    keras.utils.clear_session()
    return trained(
        make_model(
            OnDenseGradients, dtype, make_optimizer(name, CASES[dtype].arguments)
        )
    )


def with_optimizer(dtype, name, rank, size):
    optimizer = keras_hvd.DistributedOptimizer(
        make_optimizer(name, CASES[dtype].arguments)
    )
    return trained(make_model(keras.Sequential, dtype, optimizer), rank, size)


def with_strategy(dtype, name, *_):
    with keras_hvd.Strategy().scope():
        model = make_model(
            keras.Sequential, dtype, make_optimizer(name, CASES[dtype].arguments)
        )
    return trained(model)


def in_type(dtype, function, *arguments):
    plain = keras.config.floatx()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        return function(dtype, *arguments)
    finally:
        keras.config.set_floatx(plain)
        keras.config.set_dtype_policy(plain)


def types_on(size):
    """The types to test; on one rank only those that run eagerly."""
    return [dtype for dtype in CASES if size > 1 or CASES[dtype].run_eagerly]


@pytest.fixture(scope="module")
def expected(rank, size):
    """The variables after one process, by type and optimizer; each rank trains some."""
    cases = list(itertools.product(types_on(size), shipped()))
    mine = {case: in_type(case[0], one_process, case[1]) for case in cases[rank::size]}
    return {
        case: state
        for of_rank in keras_hvd.allgather_object(mine)
        for case, state in of_rank.items()
    }


@pytest.mark.parametrize("name", shipped())
@pytest.mark.parametrize("several", [with_optimizer, with_strategy])
@pytest.mark.parametrize("dtype", types_on(keras_hvd.size()))
def test_as_one_process(dtype, several, name, expected, rank, size, equal_on_all_ranks):
    paths, here = in_type(dtype, several, name, rank, size)
    _, alone = expected[dtype, name]
    tolerance = CASES[dtype].tolerance
    for path, value, wanted in zip(paths, here, alone, strict=True):
        np.testing.assert_allclose(value, wanted, tolerance, tolerance, err_msg=path)
    assert equal_on_all_ranks(here)


@pytest.mark.needs_xla
def test_slices_compiled_by_xla(rank, size):
    """Shapes are fixed there: where a row was added to another one, zeros are left."""
    if size != 2:
        pytest.skip("two ranks compile the programs of any number of them")
    for name, value, wanted in in_type("float64", slices_by_xla, rank, size):
        np.testing.assert_allclose(value, wanted, 1e-9, 1e-9, err_msg=name)


def slices_by_xla(_, rank, size):
    """The variables of all optimizers after slices, and after dense gradients."""
    generator = np.random.default_rng(4)
    indices = generator.integers(0, TOKENS - 3, (STEPS, size, ROWS))
    values = generator.standard_normal((STEPS, size, ROWS, WIDTH))
    several, alone = (
        {name: (make_optimizer(name, {}), variable()) for name in shipped()}
        for _ in range(2)
    )
    for optimizer, tokens in several.values():
        keras_hvd.DistributedOptimizer(optimizer).build([tokens])

    @tf.function(jit_compile=True, autograph=False)
    def step(indices, values):
        for optimizer, tokens in several.values():
            scaled = optimizer.scale_loss(values)
            slices = tf.IndexedSlices(scaled, indices, tf.constant([TOKENS, WIDTH]))
            optimizer.apply([slices], [tokens])

    for number in range(STEPS):
        step(tf.constant(indices[number, rank]), tf.constant(values[number, rank]))
        mean = np.zeros([TOKENS, WIDTH])
        np.add.at(mean, indices[number].ravel(), values[number].reshape(-1, WIDTH))
        for optimizer, tokens in alone.values():
            optimizer.build([tokens])
            optimizer.apply([optimizer.scale_loss(mean / size)], [tokens])
    return [(name, several[name][1], alone[name][1]) for name in several]


def variable():
    start = np.linspace(-1, 1, TOKENS * WIDTH).reshape(TOKENS, WIDTH)
    return keras.Variable(start, name="tokens")


def test_the_usual_ones_are_among_them():
    assert {"SGD", "Adam", "AdamW", "RMSprop", "LossScaleOptimizer"} <= {*shipped()}
