"""Ranks whose programs gave other names: some must agree, and some need not."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd

pytestmark = pytest.mark.usefixtures("several_ranks")


def make_model(name=None, width=3):
    return keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(width, activation="tanh"),
            keras.layers.Dense(1),
        ],
        name=name,
    )


def make_nested(name=None):
    inputs = keras.Input((4,), dtype="int32")
    outputs = keras.layers.Embedding(8, 3)(inputs)
    # Unrolled: TensorFlow takes seconds to trace loops and their gradients.
    recurrent = keras.layers.SimpleRNN(2, unroll=True)
    outputs = keras.layers.Bidirectional(recurrent)(outputs)
    head = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(2)], name="head")
    return keras.Model(inputs, keras.layers.Dense(1)(head(outputs)), name=name)


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.first = keras.layers.Dense(3, activation="tanh")
        self.second = keras.Sequential([keras.layers.Dense(1)])
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.second(self.first(x)) * self.scale


def loaded(make, path):
    make().save(path)
    keras_hvd.init()
    return keras.models.load_model(path)


def make_others(make):
    """Moves all automatic numbers on."""
    keras.metrics.Mean()
    keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model = make()
    model.compile("adam", "mse", metrics=[keras.metrics.MeanSquaredError()])
    return make()


ON_RANK_0 = {
    "others before": lambda make, path: make_others(make),
    "loaded": lambda make, path: loaded(make, path / "model.keras"),
    "loaded from h5": lambda make, path: loaded(make, path / "model.h5"),
    "cloned": lambda make, path: keras.models.clone_model(make()),
    "named": lambda make, path: make(name="of_rank_0"),
}


def data_of(rank, make, rows=4):
    random = np.random.default_rng(rank)
    y = random.normal(size=(rows, 1)).astype("float32")
    if make is make_nested:
        return random.integers(0, 8, (rows, 4)), y
    return random.normal(size=(rows, 2)).astype("float32"), y


def trained(model, x, y, optimizer):
    model.compile(optimizer, "mse", auto_scale_loss=False)
    return model.fit(
        x, y, batch_size=len(x), epochs=2, verbose=0, callbacks=callbacks()
    )


def callbacks():
    return [
        keras_hvd.callbacks.BroadcastGlobalVariables(0),
        keras_hvd.callbacks.MetricAverage(),
    ]


@pytest.mark.parametrize(
    "make, how",
    [
        *((make_model, how) for how in ON_RANK_0),
        (make_nested, "others before"),
        (make_nested, "loaded"),
        (Subclassed, "loaded"),
    ],
)
def test_fit_of_a_model_made_in_another_way(how, make, rank, size, tmp_path):
    """The weights are those of one process with all the data."""
    keras.utils.clear_session()
    model = ON_RANK_0[how](make, tmp_path) if rank == 0 else make()
    parts = [data_of(each, make) for each in range(size)]
    if not model.built:
        model(parts[0][0])
    state = keras_hvd.broadcast_object(model.get_weights())
    trained(
        model, *parts[rank], keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    )

    alone = make()
    if not alone.built:
        alone(parts[0][0])
    alone.set_weights(state)
    # A trace would take longer than two steps do.
    alone.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
    alone.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
    for found, wanted in zip(
        model.trainable_variables, alone.trainable_variables, strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_rank_0_alone_loads_between_two_trainings(rank, size, tmp_path):
    """Its new optimizer continues the one that the others still have."""
    keras.utils.clear_session()
    model = make_model()
    x, y = data_of(rank, make_model)
    trained(model, x, y, keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    if rank == 0:
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
        model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(x, y, verbose=0, callbacks=callbacks())
    weights = keras_hvd.allgather_object(model.get_weights())
    for each in weights[1:]:
        np.testing.assert_equal(each, weights[0])


def test_tape_and_optimizers_of_other_numbers(run, rank, size):
    """Dense and sparse gradients, a group, and a loss scale, without callbacks."""
    keras.utils.clear_session()
    if rank == 0:
        make_others(make_model)
    layers = [keras.layers.Dense(1, use_bias=False) for _ in range(2)]
    for layer in layers:
        layer.build((None, 1))
    table = keras.layers.Embedding(4, 1)
    table.build()
    variables = [*(layer.kernel for layer in layers), table.embeddings]
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 1.0),
        groups=[[layers[0].kernel, layers[1].kernel]],
    )
    for variable in variables:
        variable.assign(tf.zeros(variable.shape))
    optimizer.build(variables)

    def step():
        grads = [
            tf.fill([1, 1], rank + 1.0),
            tf.fill([1, 1], 10 * (rank + 1.0)),
            tf.IndexedSlices(tf.fill([1, 1], rank + 1.0), tf.constant([2]), [4, 1]),
        ]
        optimizer.apply(grads, variables)
        with tf.GradientTape() as tape:
            loss = (rank + 1.0) * tf.reduce_sum(layers[0].kernel)
        tape = keras_hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, [layers[0].kernel])[0]

    mean = (size + 1) / 2
    np.testing.assert_allclose(run(step)(), [[mean]])
    np.testing.assert_allclose(layers[0].kernel, [[-mean]])
    np.testing.assert_allclose(layers[1].kernel, [[-10 * mean]])
    np.testing.assert_allclose(table.embeddings, [[0], [0], [-mean], [0]])


def test_two_optimizers_of_one_step_are_not_mixed_up(run, rank, size):
    """Each in a function of its own; TensorFlow may run the two at the same time."""
    keras.utils.clear_session()
    if rank == 0:
        keras.optimizers.SGD()

    def make(factor):
        weight = keras.Variable(np.zeros(5000, "float32"), name="w")
        optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([weight])

        def apply():
            optimizer.apply([tf.fill([5000], factor * (rank + 1.0))], [weight])

        return run(apply), weight

    steps, weights = zip(*map(make, (1.0, 100.0)), strict=True)

    def both():
        for step in steps:
            step()

    both = run(both)
    for _ in range(20):
        both()
    mean = 20 * (size + 1) / 2
    np.testing.assert_allclose(weights[0], np.full(5000, -mean))
    np.testing.assert_allclose(weights[1], np.full(5000, -100 * mean))


@pytest.mark.parametrize("by", ["optimizer", "tape"])
def test_layers_of_other_names(run, by, rank, size):
    """All ranks learn the first names that differ."""
    own = "dense" if rank == 0 else "conv"
    names = ["before", own, "after"]
    layers = [keras.layers.Dense(1, use_bias=False, name=name) for name in names]
    for layer in layers:
        layer.build((None, 1))
    kernels = [layer.kernel for layer in layers]
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(), name="x")
    optimizer.build(kernels)

    def step():
        if by == "optimizer":
            return optimizer.apply([tf.ones([1, 1])] * 3, kernels)
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(each) for each in kernels)
        return keras_hvd.DistributedGradientTape(tape).gradient(loss, kernels)

    with pytest.raises(tf.errors.FailedPreconditionError) as raised:
        run(step)()
    text = str(raised.value)
    assert "number 2 is 'dense/kernel' of float32[1,1]; rank" in text
    assert "number 2 is 'conv/kernel' of float32[1,1])" in text
    assert "uint8" not in text


def test_only_sparse_gradients_of_other_names(rank):
    table = keras.layers.Embedding(4, 1, name="words" if rank == 0 else "users")
    table.build()
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(), name="y")
    slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([2]), [4, 1])
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="slices of words/embeddings"
    ):
        optimizer.apply([slices], [table.embeddings])


@pytest.mark.parametrize("by", ["callback", "optimizer"])
def test_towers_in_another_order(by, rank):
    """Equal layers in blocks that the user has named."""
    keras.utils.clear_session()
    names = ["left", "right"] if rank == 0 else ["right", "left"]
    inputs = keras.Input((2,))
    towers = [keras.Sequential([keras.layers.Dense(2)], name=each) for each in names]
    model = keras.Model(inputs, keras.layers.Add()([t(inputs) for t in towers]))
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(), name="z")
    model.compile(optimizer, "mse")
    x = np.ones((2, 2), "float32")
    if by == "callback":
        error, text = RuntimeError, "rank 0 has left/dense/kernel"
    else:
        error, text = tf.errors.FailedPreconditionError, "is 'right/dense/bias'"
    with pytest.raises(error, match=text):
        model.fit(x, x, verbose=0, callbacks=callbacks() if by == "callback" else None)


def test_learning_rates_are_compared_whatever_the_number(rank):
    keras.utils.clear_session()
    if rank == 0:
        keras.optimizers.SGD()
    model = make_model()

    class Halve(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank == 0:
                self.model.optimizer.learning_rate = 0.5

    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), "mse")
    x, y = data_of(rank, make_model)
    with pytest.raises(RuntimeError, match="'sgd' is 0.5 on rank 0, 1 on rank 1"):
        model.fit(x, y, verbose=0, callbacks=[*callbacks(), Halve()])
