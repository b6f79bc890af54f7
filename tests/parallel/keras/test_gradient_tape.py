"""DistributedGradientTape: gradients of N ranks as of one process on all the data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd import Compression
from keras_hvd.backends.tensorflow.collectives import gradients
from keras_hvd.callbacks import BroadcastGlobalVariables

RUNS = {
    "eager": lambda function: function,
    "graph": tf.function,
    "jit_compile": tf.function(jit_compile=True),
}
runs = pytest.mark.parametrize(
    "run", ["eager", "graph", pytest.param("jit_compile", marks=pytest.mark.needs_xla)]
)


def gradients_of(make, run, rank, **arguments):
    """The gradients of a matrix and of a table whose rows are gathered."""
    w = tf.Variable(np.ones((3, 2), "float32"), name="w")
    table = tf.Variable(np.ones((4, 3), "float32"), name="table")
    unused = tf.Variable(1.0, name="unused")
    if arguments.pop("in_groups", False):
        arguments["groups"] = [[w, table]]

    def compute():
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [0, rank % 4, 0])
            loss = (rank + 1.0) * tf.reduce_sum(rows @ w)
        tape = make(tape, **arguments)
        found = tape.gradient(loss, {"w": w, "others": [table, unused]})
        assert found["others"][1] is None
        return found["w"], tf.convert_to_tensor(found["others"][0])

    return [each.numpy() for each in RUNS[run](compute)()]


def expected(size):
    """The sums of these gradients over the ranks."""
    table, w = np.zeros((4, 3)), np.zeros((3, 2))
    for rank in range(size):
        for row in (0, rank % 4, 0):
            table[row] += 2 * (rank + 1)
        w += 3 * (rank + 1)
    return w, table


@runs
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"op": keras_hvd.Sum, "sparse_as_dense": True},
        {"compression": Compression.fp16, "in_groups": True, "sparse_as_dense": True},
        {"gradient_predivide_factor": 2.0, "groups": 2},
        {"compression": Compression.bf16, "device_dense": "/a", "device_sparse": "/b"},
    ],
    ids=["defaults", "sum", "fp16", "predivide", "bf16"],
)
def test_gradients(arguments, run, rank, size):
    found = gradients_of(keras_hvd.DistributedGradientTape, run, rank, **arguments)
    divisor = 1 if arguments.get("op") == keras_hvd.Sum else size
    for one, other in zip(found, expected(size), strict=True):
        np.testing.assert_allclose(one, other / divisor, rtol=1e-3)


def test_one_source_and_several_calls(rank, size):
    """With a persistent tape, and with output gradients."""
    w = tf.Variable([1.0], name="w")
    with tf.GradientTape(persistent=True) as tape:
        y, z = (rank + 1) * w, rank * w
    tape = keras_hvd.DistributedGradientTape(tape)
    found = tape.gradient(y, w, output_gradients=tf.constant([2.0]))
    np.testing.assert_allclose(found, [size + 1])
    np.testing.assert_allclose(tape.gradient(z, [w])[0], [(size - 1) / 2])


def test_sources_without_gradients(size):
    w = tf.Variable([1.0], name="w")
    with tf.GradientTape(persistent=True) as tape:
        y = tf.constant([1.0])
    tape = keras_hvd.DistributedGradientTape(tape)
    assert tape.gradient(y, [w]) == [None]
    zeros = tape.gradient(y, w, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    np.testing.assert_array_equal(zeros, [0.0])


def test_gradients_of_other_variables_on_each_rank_are_an_error(rank, several_ranks):
    v, w = (tf.Variable([1.0], name=name) for name in "vw")
    with tf.GradientTape() as tape:
        y = 2 * v if rank == 0 else 2 * w
    tape = keras_hvd.DistributedGradientTape(tape)
    with pytest.raises(tf.errors.FailedPreconditionError, match="Tape/gradients/0"):
        tape.gradient(y, [v, w])


def test_factors_that_differ_are_an_error_on_every_rank(rank, size, several_ranks):
    w = tf.Variable([1.0], name="w")
    with tf.GradientTape() as tape:
        y = 2 * w
    factor = 2.0 if rank == size - 1 else 1.0
    tape = keras_hvd.DistributedGradientTape(tape, gradient_predivide_factor=factor)
    with pytest.raises(tf.errors.FailedPreconditionError, match="Tape/gradients/0"):
        tape.gradient(y, w)
    assert keras_hvd.allreduce(1, op=keras_hvd.Sum) == size


@pytest.mark.parametrize("run", ["eager", "graph"])
def test_twice_is_an_error(run, several_ranks):
    variable = keras.Variable([1.0], name="v")
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])

    def step():
        with tf.GradientTape() as tape:
            loss = 2.0 * variable.value
        tape = keras_hvd.DistributedGradientTape(tape)
        optimizer.apply([tape.gradient(loss, variable.value)], [variable])

    with pytest.raises(RuntimeError, match="reduced twice"):
        RUNS[run](step)()


class WithTape(keras.Sequential):
    distributed = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        if self.distributed:
            tape = keras_hvd.DistributedGradientTape(tape)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class WithPlainTape(WithTape):
    distributed = False


def fit(kind, x, y, **compiled):
    model = kind([keras.Input((3,)), keras.layers.Dense(2, name="linear")])
    model.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
    for _ in range(2):
        model.fit(
            x,
            y,
            batch_size=4,
            shuffle=False,
            verbose=0,
            callbacks=[BroadcastGlobalVariables(0)],
        )
    return model


@pytest.mark.parametrize(
    "xla", [False, pytest.param(True, marks=pytest.mark.needs_xla)]
)
def test_train_step(xla, rank, points, equal_on_all_ranks):
    """With a plain optimizer, which the callbacks take where a tape reduces."""
    x, y = points
    model = fit(WithTape, x + rank, y, jit_compile=xla)
    assert equal_on_all_ranks(model.get_weights())


def test_train_step_that_reduces_nothing(rank, points, several_ranks):
    with pytest.raises(RuntimeError, match="DistributedGradientTape in a train_step"):
        fit(WithPlainTape, *points)


@pytest.fixture(params=["on_cpus", "as_on_gpus"])
def form(request, monkeypatch):
    """The form of the reduction: that of the gradients' device, or that of a GPU."""
    if request.param == "as_on_gpus":
        monkeypatch.setattr(gradients, "are_on_gpu", lambda tensors: True)


@runs
@pytest.mark.usefixtures("form")
def test_gradients_of_gradients(run, rank, size):
    """A penalty on the averaged gradients, of variables in several buckets."""
    v, w = tf.Variable([2.0, 3.0], name="v"), tf.Variable([[4.0]], name="w")

    def step():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = (rank + 1.0) * (tf.reduce_sum(v**3) + w[0, 0] ** 2)
            tape = keras_hvd.DistributedGradientTape(tape, groups=[[v], [w]])
            of_v, of_w = tape.gradient(loss, [v, w])
            # The second bucket has a part in the penalty of rank 0 alone.
            penalty = tf.reduce_sum(of_v) + (rank == 0) * of_w[0, 0]
        return outer.gradient(penalty, [v, w])

    # Each rank's own factor, times the average of all ranks' gradients.
    found_v, found_w = RUNS[run](step)()
    np.testing.assert_allclose(found_v, (rank + 1) * 6 * np.array([2.0, 3.0]))
    np.testing.assert_allclose(found_w, [[(rank + 1) * 2 / size]])


@pytest.mark.usefixtures("form")
def test_gradients_of_gradients_in_a_bucket_of_which_one_is_asked(rank):
    v, w = tf.Variable(2.0, name="v"), tf.Variable(4.0, name="w")
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = v**2 * (rank + 1.0) + 5 * w
        of_v, _ = keras_hvd.DistributedGradientTape(tape).gradient(loss, [v, w])
    assert outer.gradient(of_v, [v, w])[0].numpy() == 2 * (rank + 1)


def test_local_and_global_gradients(rank, size):
    local, *others = (tf.Variable(1.0, name=name) for name in "abc")
    with tf.GradientTape() as tape:
        loss = (rank + 1.0) * (local + 2 * others[0] + 3 * others[1])
    tape = keras_hvd.DistributedGradientTape(tape)
    tape.register_local_source(local)
    sources = [others[0], local, others[1]]
    of_local, of_others = tape.get_local_and_global_gradients(loss, sources)
    [(source, gradient)] = of_local
    assert source is local
    np.testing.assert_allclose(gradient, (rank + 1) / size, rtol=1e-6)
    assert [source for source, _ in of_others] == others
    mean = (size + 1) / 2
    np.testing.assert_allclose([g for _, g in of_others], [2 * mean, 3 * mean])
