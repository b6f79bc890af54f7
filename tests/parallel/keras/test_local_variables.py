"""Variables whose gradients stay on their rank, of the optimizer and of the tape."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd


def shared_and_local() -> list[keras.Variable]:
    return [keras.Variable([0.0], name=name) for name in ("shared", "local")]


def step(optimizer, variables, rank):
    optimizer.apply([tf.constant([float(rank)])] * 2, variables)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("op", [keras_hvd.Average, keras_hvd.Sum])
def test_scale_local_gradients(scale, op, rank, size):
    """The local variable of rank r moves by r, or by r / size as of a mean's part."""
    variables = shared_and_local()
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), op=op, scale_local_gradients=scale
    )
    optimizer.register_local_var(variables[1])
    step(optimizer, variables, rank)
    total = size * (size - 1) / 2
    shared = total if op == keras_hvd.Sum else total / size
    np.testing.assert_allclose(variables[0], [-shared], rtol=1e-6)
    np.testing.assert_allclose(variables[1], [-rank / (size if scale else 1)])


def test_what_is_registered_may_be_tensorflows_variable(rank, size):
    variables = shared_and_local()
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(variables[1].value)
    step(optimizer, variables, rank)
    np.testing.assert_allclose(variables[1], [-rank / size])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 1.0),
        lambda: keras.optimizers.MultiOptimizer(lambda _: keras.optimizers.SGD(1.0)),
    ],
    ids=["loss_scale", "multi"],
)
def test_outer_optimizers_pass_it_on(wrap, rank, size):
    variables = shared_and_local()
    optimizer = keras_hvd.DistributedOptimizer(wrap())
    optimizer.register_local_var(variables[1])
    step(optimizer, variables, rank)
    np.testing.assert_allclose(variables[0], [-(size - 1) / 2])
    np.testing.assert_allclose(variables[1], [-rank / size])


def test_copies_know_them_by_path(rank, size):
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(shared_and_local()[1])
    copied, variables = copy.deepcopy(optimizer), shared_and_local()
    step(copied, variables, rank)
    np.testing.assert_allclose(variables[0], [-(size - 1) / 2])
    np.testing.assert_allclose(variables[1], [-rank / size])


@pytest.mark.parametrize(
    "compiled",
    [
        {},
        {"run_eagerly": True},
        pytest.param({"jit_compile": True}, marks=pytest.mark.needs_xla),
    ],
)
def test_layers(compiled, rank, points, difference, equal_on_all_ranks):
    """Ranks train one body together, and each its own head, which is built later."""
    keras.utils.set_random_seed(2)
    body = keras.layers.Dense(3, activation="tanh", name="body")
    head = keras.layers.Dense(2, name="head")
    optimizer = keras_hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=[head]
    )
    model = keras.Sequential([keras.Input((3,)), body, head], name="model")
    model.compile(optimizer, "mse", **compiled)
    x, y = points
    callbacks = [keras_hvd.callbacks.BroadcastGlobalVariables(0)]
    model.fit(x + rank, y - rank, batch_size=8, verbose=0, callbacks=callbacks)
    assert equal_on_all_ranks(body.get_weights())
    heads = keras_hvd.allgather_object(head.get_weights())
    for other, weights in enumerate(heads):
        assert other == rank or difference(weights, head.get_weights()) > 1e-3


def gradients_of(tape_of, run, rank):
    """The gradients of w, rank + 1, and of v, 2 * (rank + 1)."""
    w, v = tf.Variable([1.0], name="w"), tf.Variable([1.0], name="v")
    calls = []

    def compute():
        with tf.GradientTape() as tape:
            loss = (rank + 1.0) * (w + 2 * v)
        tape = tape_of(tape, v)
        calls.append(tape)
        return tape.gradient(loss, [w, v])

    return [each.numpy() for each in run(compute)()]


def with_registered_source(tape, v):
    tape = keras_hvd.DistributedGradientTape(tape)
    tape.register_local_source(v)
    return tape


def with_registered_source_unscaled(tape, v):
    tape = keras_hvd.DistributedGradientTape(tape, scale_local_gradients=False)
    tape.register_local_source(v)
    return tape


@pytest.mark.parametrize(
    "run",
    [
        lambda f: f,
        tf.function,
        pytest.param(tf.function(jit_compile=True), marks=pytest.mark.needs_xla),
    ],
    ids=["eager", "graph", "jit_compile"],
)
def test_sources_of_tapes(run, rank, size):
    w, v = gradients_of(with_registered_source, run, rank)
    np.testing.assert_allclose(w, [(size + 1) / 2], rtol=1e-6)
    np.testing.assert_allclose(v, [2 * (rank + 1) / size], rtol=1e-6)
    w, v = gradients_of(with_registered_source_unscaled, run, rank)
    np.testing.assert_allclose(w, [(size + 1) / 2], rtol=1e-6)
    np.testing.assert_allclose(v, [2 * (rank + 1)], rtol=1e-6)


def test_layers_of_tapes(rank, size):
    layers = [keras.layers.Dense(1, use_bias=False, name=each) for each in "ab"]
    x = tf.constant([[rank + 1.0]])
    with tf.GradientTape() as tape:
        loss = layers[0](x) + layers[1](x)
    tape = keras_hvd.PartialDistributedGradientTape(tape, local_layers=layers[1:])
    shared, local = tape.gradient(loss, [each.kernel for each in layers])
    np.testing.assert_allclose(shared, [[(size + 1) / 2]], rtol=1e-6)
    np.testing.assert_allclose(local, [[(rank + 1) / size]], rtol=1e-6)


@pytest.mark.parametrize("registered", [False, True])
def test_local_variables_are_not_broadcast(registered, rank, size, points):
    """Nor the optimizer's state of theirs; they may have other shapes on each rank."""
    keras.utils.set_random_seed(rank)
    body = keras.layers.Dense(3, name="head")
    # Keras begins the names of both layers' state with "head_kernel_".
    heads = [
        keras.layers.Dense(1 + rank, name="head_kernel"),
        keras.layers.Dense(2, name="h"),
    ]
    model = keras.Sequential([keras.Input((3,)), body, *heads], name="model")
    local = [each for head in heads for each in head.trainable_weights]
    optimizer = keras_hvd.PartialDistributedOptimizer(
        keras.optimizers.Adam(0.1), local_layers=heads
    )
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    for each in optimizer.variables[2:]:
        each.assign(each + rank)
    callback = keras_hvd.callbacks.BroadcastGlobalVariables(
        size - 1, local_variables=() if registered else local
    )
    for each in local if registered else ():
        callback.register_local_var(each)

    class Seen(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.slots = [each.numpy() for each in optimizer.variables[2:]]
            self.weights = [each.numpy() for each in model.trainable_variables]

    seen, before = Seen(), model.get_weights()
    model.fit(*points, verbose=0, callbacks=[callback, seen])
    owners = [size - 1] * 2 + [rank] * 4
    for slot, weight in zip(seen.slots[::2], owners, strict=True):
        np.testing.assert_array_equal(slot, np.full_like(slot, weight))
    for weight, other in zip(seen.weights[2:], before[2:], strict=True):
        np.testing.assert_array_equal(weight, other)
    of_root = keras_hvd.broadcast_object(before[:2], size - 1)
    for weight, other in zip(seen.weights[:2], of_root, strict=True):
        np.testing.assert_array_equal(weight, other)


def test_statistics_of_local_layers_stay_on_their_rank(rank, points):
    layers = [
        keras.layers.BatchNormalization(momentum=0.5, name=name)
        for name in ("shared", "own")
    ]
    inputs = keras.Input((3,))
    outputs = [layer(inputs) for layer in layers]
    model = keras.Model(inputs, keras.layers.Dense(2)(sum(outputs)))
    optimizer = keras_hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=layers[1]
    )
    model.compile(optimizer, "mse")
    x, y = points
    broadcast = keras_hvd.callbacks.BroadcastGlobalVariables(0)
    model.fit(x + rank, y, batch_size=len(x), verbose=0, callbacks=[broadcast])
    own = (x.mean(axis=0) + rank) / 2
    np.testing.assert_allclose(layers[1].moving_mean, own, rtol=1e-5)
    of_all = np.mean(keras_hvd.allgather_object(own), axis=0)
    np.testing.assert_allclose(layers[0].moving_mean, of_all, rtol=1e-5)
