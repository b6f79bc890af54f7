"""Rows that a sparse gradient has several times count as their sum.

On one rank or on several. Adam tells: plain Keras would add up their squares.
"""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.backends.tensorflow.gradients import reduction

TOKENS, STEPS = 7, 4


def tokens_of(rank, step, rows):
    """Some several times, some on one rank only, and none of some; eighths, which
    float16 holds and adds up exactly."""
    generator = np.random.default_rng([rank, step])
    indices = generator.integers(0, TOKENS - 2, rows) + rank % 2
    return indices, generator.integers(-40, 40, (rows, 2)) / 8


def rows_of(rank, step):
    """Another number on each rank, none on rank 1 in the first step."""
    return 0 if rank == 1 and step == 0 else 6 + rank


def as_many(rank, step):
    """The same number on each rank, which programs of XLA need."""
    return 6


def mean_of_dense(step, size, rows):
    mean = np.zeros([TOKENS, 2])
    for rank in range(size):
        indices, values = tokens_of(rank, step, rows(rank, step))
        np.add.at(mean, indices, values / size)
    return mean


def make_variables():
    generator = np.random.default_rng(0)
    embeddings = keras.Variable(generator.random((TOKENS, 2)), "float64", name="tokens")
    return [embeddings, keras.Variable(np.ones(2), dtype="float64", name="dense")]


def loss_of(variables, indices, values):
    """Its gradients: the values, as slices, and 2."""
    embeddings, dense = variables
    rows = tf.gather(embeddings, tf.reshape(indices, [-1]))
    return tf.reduce_sum(rows * values) + tf.reduce_sum(2 * dense)


def by_optimizer(optimizer, variables, compression):
    optimizer = keras_hvd.DistributedOptimizer(optimizer, compression=compression)

    def step(indices, values):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(loss_of(variables, indices, values))
        optimizer.apply(tape.gradient(loss, variables), variables)

    return step


def by_tape(optimizer, variables, compression):
    def step(indices, values):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(loss_of(variables, indices, values))
        tape = keras_hvd.DistributedGradientTape(tape, compression=compression)
        optimizer.apply(tape.gradient(loss, variables), variables)

    return step


def by_strategy(optimizer, variables, compression):
    strategy = keras_hvd.Strategy()

    def replica_step(indices, values):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, indices, values) / strategy.num_replicas_in_sync
            loss = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(loss, variables), variables)

    return lambda *batch: strategy.run(replica_step, batch)


def trained(by, make, size, run, rows, rank, compression=keras_hvd.Compression.none):
    """The variables, and those of plain Keras on the dense gradients of all ranks."""
    expected = on_dense(make, size, rows)
    keras.utils.clear_session()
    with keras_hvd.Strategy().scope() if by is by_strategy else nullcontext():
        variables, optimizer = make_variables(), make()
        optimizer.build(variables)
        step = run(by(optimizer, variables, compression))
    for number in range(STEPS):
        step(*map(tf.constant, tokens_of(rank, number, rows(rank, number))))
    return variables, expected


def make_adam(**arguments):
    return keras.optimizers.Adam(0.1, **arguments)


OPTIONS = {
    "plain": make_adam,
    "clipnorm": lambda: make_adam(clipnorm=0.5),
    "global_clipnorm": lambda: make_adam(global_clipnorm=0.5),
    "clipvalue": lambda: make_adam(clipvalue=0.5),
    "accumulation": lambda: make_adam(gradient_accumulation_steps=2),
    "ema": lambda: make_adam(use_ema=True, ema_overwrite_frequency=2),
    "weight_decay": lambda: make_adam(weight_decay=0.1),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(make_adam()),
}


def on_dense(make, size, rows):
    """The variables of plain Keras after the dense gradients of all ranks."""
    variables, optimizer = make_variables(), make()
    optimizer.build(variables)
    for step in range(STEPS):
        gradients = tf.constant(mean_of_dense(step, size, rows)), np.full(2, 2.0)
        optimizer.apply([optimizer.scale_loss(each) for each in gradients], variables)
    return [np.array(each) for each in variables]


def require_equal(variables, expected):
    for variable, wanted in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable, wanted, 1e-9, 1e-9)


every_way = pytest.mark.parametrize("by", [by_optimizer, by_tape, by_strategy])


@pytest.mark.parametrize("option", OPTIONS)
@every_way
def test_the_step_is_that_of_dense_gradients(by, option, rank, size):
    require_equal(*trained(by, OPTIONS[option], size, tf.function, rows_of, rank))


@pytest.mark.parametrize("by", [by_optimizer, by_tape])
def test_compressed(by, rank, size):
    compression = keras_hvd.Compression.fp16
    arguments = by, make_adam, size, tf.function, rows_of, rank
    require_equal(*trained(*arguments, compression))


@every_way
def test_in_every_kind_of_function(by, run, rank, size):
    require_equal(*trained(by, make_adam, size, run, as_many, rank))


def test_a_tape_gives_each_row_once(run, way, rank, size):
    variables = make_variables()

    @run
    def gradient(indices, values):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, indices, values)
        tape = keras_hvd.DistributedGradientTape(tape)
        slices, _ = tape.gradient(loss, variables)
        assert isinstance(slices, tf.IndexedSlices)
        return slices.indices, slices.values

    indices, values = gradient(*map(tf.constant, tokens_of(rank, 1, 6)))
    expected = mean_of_dense(1, size, as_many)
    times = np.bincount(indices, np.any(values != 0, axis=1), TOKENS)
    np.testing.assert_array_equal(times, np.any(expected != 0, axis=1))
    np.testing.assert_allclose(np.array(values)[times[indices] == 0], 0)
    if way != "xla":
        assert len(set(indices.numpy())) == len(indices)
    here = np.zeros_like(expected)
    np.add.at(here, indices, values)
    np.testing.assert_allclose(here, expected, 1e-12, 1e-12)


def test_rows_are_added_up_before_they_travel(rank, several_ranks, monkeypatch):
    sent = []
    allreduce = reduction.allreduce

    def noting(slices, **named):
        sent.extend(slices.indices.numpy())
        return allreduce(slices, **named)

    monkeypatch.setattr(reduction, "allreduce", noting)
    variables = make_variables()
    step = by_optimizer(make_adam(), variables, keras_hvd.Compression.none)
    indices, values = tokens_of(rank, 1, 40)
    step(tf.constant(indices), tf.constant(values))
    assert sorted(sent) == sorted(set(indices))


def test_those_of_a_local_variable(rank, size):
    variables = make_variables()
    optimizer = keras_hvd.DistributedOptimizer(make_adam())
    optimizer.register_local_var(variables[0])
    reference, alone = make_variables(), make_adam()
    for number in range(STEPS):
        indices, values = tokens_of(rank, number, 6)
        slices = tf.IndexedSlices(
            tf.constant(values), tf.constant(indices), tf.constant([TOKENS, 2])
        )
        optimizer.apply([slices], variables[:1])
        # In the scale of the mean over all ranks.
        alone.apply([tf.convert_to_tensor(slices) / size], reference[:1])
    np.testing.assert_allclose(variables[0], reference[0], 1e-9, 1e-9)
