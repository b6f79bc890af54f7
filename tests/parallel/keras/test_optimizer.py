"""DistributedOptimizer, in each way to train and with each kind of optimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.backends.tensorflow.collectives import submission

BATCH_OF_RANK = 2


def by_fit(model, x, y):
    model.fit(x, y, batch_size=BATCH_OF_RANK, shuffle=False, verbose=0)


def by_train_on_batch(model, x, y):
    for batch in batches(x, y, BATCH_OF_RANK):
        model.train_on_batch(*batch)


def by_apply(model, x, y):
    for x_batch, y_batch in batches(x, y, BATCH_OF_RANK):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=y_batch, y_pred=model(x_batch))
        weights = model.trainable_weights
        model.optimizer.apply(tape.gradient(loss, weights), weights)


def by_apply_gradients(model, x, y):
    @tf.function
    def step(x_batch, y_batch):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=y_batch, y_pred=model(x_batch))
        weights = model.trainable_weights
        gradients = tape.gradient(loss, weights)
        model.optimizer.apply_gradients(zip(gradients, weights))

    for batch in batches(x, y, BATCH_OF_RANK):
        step(*batch)


class WithTrainStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def batches(x, y, size):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def gradient_of_all(model, x, y):
    """Gradients on all ranks' rows at once, as numbers."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    return [gradient.numpy() for gradient in tape.gradient(loss, model.weights)]


@pytest.fixture
def reference(make_linear, points, size):
    """The weights that one process trains on all rows with SGD(0.1)."""
    keras.utils.set_random_seed(5)
    model = make_linear(None)
    for batch in batches(*points, BATCH_OF_RANK * size):
        for weight, gradient in zip(model.weights, gradient_of_all(model, *batch)):
            weight.assign(weight - 0.1 * gradient)
    keras.utils.clear_session()
    return model.get_weights()


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize(
    "train", [by_fit, by_train_on_batch, by_apply, by_apply_gradients]
)
def test_ways_to_train(
    train, run_eagerly, make_linear, points, part_of_batches, reference, difference
):
    keras.utils.set_random_seed(5)
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = make_linear(optimizer, run_eagerly=run_eagerly)
    train(model, *[part_of_batches(rows, BATCH_OF_RANK) for rows in points])
    assert difference(model.get_weights(), reference) < 1e-6


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("train", [by_fit, by_apply_gradients])
def test_gradients_that_start_and_end_apart(
    train,
    run_eagerly,
    make_linear,
    points,
    part_of_batches,
    reference,
    difference,
    size,
    starts,
    monkeypatch,
):
    monkeypatch.setattr("keras_hvd.backends.buckets.LARGE", 1)
    keras.utils.set_random_seed(5)
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = make_linear(optimizer, run_eagerly=run_eagerly)
    train(model, *[part_of_batches(rows, BATCH_OF_RANK) for rows in points])
    assert difference(model.get_weights(), reference) < 1e-6
    assert set(starts) == (
        {"sgd/gradients/0", "sgd/gradients/1"} if size > 1 else set()
    )


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_custom_train_step(
    steps_per_execution, points, part_of_batches, reference, difference
):
    keras.utils.set_random_seed(5)
    model = WithTrainStep(
        [keras.Input((3,)), keras.layers.Dense(2, name="linear")], name="model"
    )
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    by_fit(model, *[part_of_batches(rows, BATCH_OF_RANK) for rows in points])
    assert difference(model.get_weights(), reference) < 1e-6


def test_sum(rank, size):
    variable = keras.Variable([0.0, 0.0], name="v")
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), op=keras_hvd.Sum
    )
    optimizer.apply([tf.constant([1.0, rank])], [variable])
    np.testing.assert_allclose(variable, [-size, -size * (size - 1) / 2])


def test_variables_may_come_from_a_generator(rank, size):
    variables = [keras.Variable([0.0], name=name) for name in ("a", "b")]
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.constant([float(rank)])] * 2, (each for each in variables))
    for variable in variables:
        np.testing.assert_allclose(variable, [-(size - 1) / 2])


class Probing(keras.optimizers.SGD):
    """Applies nothing first, by its own apply(), and then the gradients."""

    _probes = False

    def apply(self, grads, trainable_variables=None):
        if not self._probes:
            self._probes = True
            self.apply([0.0 * grad for grad in grads], trainable_variables)
            self._probes = False
        super().apply(grads, trainable_variables)


def test_an_optimizer_may_apply_within_apply(rank, size):
    variable = keras.Variable([0.0])
    optimizer = keras_hvd.DistributedOptimizer(Probing(1.0))
    optimizer.apply([tf.constant([float(rank)])], [variable])
    np.testing.assert_allclose(variable, [-(size - 1) / 2])


def test_accumulation_reduces_once_per_update(rank, size, monkeypatch):
    calls = []
    reduce = submission.submit

    def counting(*arguments, **named):
        calls.append(arguments)
        return reduce(*arguments, **named)

    monkeypatch.setattr(submission, "submit", counting)
    variable = keras.Variable([0.0], name="v")
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    )
    for _ in range(8):
        optimizer.apply([tf.constant([float(rank)])], [variable])
    assert len(calls) == (4 if size > 1 else 0)
    np.testing.assert_allclose(variable, [-4 * (size - 1) / 2])


# The MiB of four variables that leave together, by default and with chosen groups.
MIB = 1 << 18  # floats
BUCKETS = {
    "by size": (None, [[0.5, 3, 2], [7]]),
    "a group of one's own": ("first and fourth", [[0.5, 7], [3, 2]]),
    "a number of groups": (2, [[0.5, 3], [2, 7]]),
}


@pytest.mark.parametrize("kind", BUCKETS)
def test_buckets_leave_last_layer_first_and_free_of_each_other(
    kind, rank, size, several_ranks
):
    """A bucket ends once it has 4 MiB, by default."""
    groups, buckets = BUCKETS[kind]
    first, _, _, fourth = variables = [
        keras.Variable(np.zeros(int(n * MIB), "float32"), name=name)
        for name, n in {"first": 7, "second": 2, "third": 3, "fourth": 0.5}.items()
    ]
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0, name="sgd"),
        groups=[[first, fourth]] if groups == "first and fourth" else groups,
    )
    optimizer.build(variables)

    @tf.function
    def step():
        gradients = [tf.fill(v.shape, i + float(rank)) for i, v in enumerate(variables)]
        optimizer.apply(gradients, variables)

    graph = step.get_concrete_function().graph
    found = [op for op in graph.get_operations() if op.type == "KerasHvdAllreduce"]
    assert {op.get_attr("tensor_name").decode(): floats_of(op) for op in found} == {
        f"sgd/gradients/{i}": [n * MIB for n in bucket]
        for i, bucket in enumerate(buckets)
    }
    assert not any(set(op.control_inputs) & set(found) for op in found)
    step()
    for i, variable in enumerate(variables):
        assert np.unique(variable).tolist() == [-i - (size - 1) / 2]


def floats_of(op: tf.Operation) -> list[int]:
    return [each.shape.num_elements() for each in op.inputs if each.dtype == tf.float32]


@pytest.mark.parametrize("run", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_gradients_of_other_variables_on_each_rank_are_an_error(run, rank, size):
    if size == 1:
        pytest.skip("there is nobody to differ from")
    variables = [tf.Variable([0.0], name=name) for name in ("a", "b", "c")]
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(variables)
    gradients = [tf.constant([1.0]) for _ in variables]
    # Equally many on each rank, and of equal shapes.
    gradients[1 if rank == 0 else 2] = None

    with pytest.raises(
        tf.errors.FailedPreconditionError, match="sgd/gradients/0.*differs"
    ):
        run(lambda: optimizer.apply(gradients, variables))()
    assert [variable.numpy() for variable in variables] == [0.0, 0.0, 0.0]


def test_variables_with_the_same_path(rank, size):
    variables = [tf.Variable([0.0]) for _ in range(2)]
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.constant([1.0]), tf.constant([float(rank)])], variables)
    np.testing.assert_allclose(variables[0], [-1.0])
    np.testing.assert_allclose(variables[1], [-(size - 1) / 2])


def test_twins_in_one_function(rank, size):
    """Optimizers and variables of the same names, whose reductions may overlap."""
    twins = [keras.Variable([0.0], name="w") for _ in range(2)]
    optimizers = [
        keras.optimizers.LossScaleOptimizer(
            keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, name="twin")),
            initial_scale=1.0,
            name="scale",
        )
        for _ in twins
    ]
    for optimizer, variable in zip(optimizers, twins):
        optimizer.build([variable])

    @tf.function
    def step():
        for i in range(2):
            optimizers[i].apply([tf.constant([float(rank + i)])], [twins[i]])

    for _ in range(20):
        step()
    for i, variable in enumerate(twins):
        np.testing.assert_allclose(variable, [-20 * ((size - 1) / 2 + i)])


def test_gradient_that_overwrites(rank, size):
    """Scales of float8 layers: Keras assigns their gradients, before it clips."""
    weight = keras.Variable([0.0], name="weight")
    scale = keras.Variable([0.0], name="scale")
    scale.overwrite_with_gradient = True
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    gradients = [tf.constant([1.0]), tf.constant([float(rank + 1)])]
    optimizer.apply(gradients, [weight, scale])
    np.testing.assert_allclose(weight, [-1.0])
    np.testing.assert_allclose(scale, [size])


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
def test_infinite_gradient_on_one_rank(
    run_eagerly, rank, size, make_linear, equal_on_all_ranks
):
    """The step is skipped by all ranks or by none."""
    keras.utils.set_random_seed(5)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        model = make_linear(optimizer, run_eagerly=run_eagerly)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    model.optimizer.initial_scale = 1024.0
    x, y = np.ones((2, 3), "float32"), np.full((2, 2), rank, "float32")
    for step in range(4):
        spoilt = step == 2 and rank == size - 1
        model.train_on_batch(x * np.inf if spoilt else x, y)
    assert all(np.isfinite(weights).all() for weights in model.get_weights())
    assert int(model.optimizer.iterations) == 3
    assert float(model.optimizer.dynamic_scale) == 512.0
    assert equal_on_all_ranks(model.get_weights())
    assert equal_on_all_ranks([each.numpy() for each in model.optimizer.variables])


def test_explicit_loss_scale(rank, size, equal_on_all_ranks):
    variable = keras.Variable([0.0], name="v")
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 2.0)
    )
    for gradient in (2.0 * rank, np.inf if rank == 0 else 1.0, rank):
        optimizer.apply([tf.constant([float(gradient)])], [variable])
    # The second step was skipped, after which the scale is 1.
    np.testing.assert_allclose(variable, [-2 * (size - 1) / 2])
    assert equal_on_all_ranks([each.numpy() for each in optimizer.variables])


def test_multi_optimizer_by_function(rank, size):
    """The inner optimizers are known when it is built."""
    variables = [keras.Variable([0.0], name=name) for name in ("a", "b")]
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.MultiOptimizer(lambda _: keras.optimizers.SGD(1.0))
    )
    optimizer.apply([tf.constant([float(rank)])] * 2, variables)
    for variable in variables:
        np.testing.assert_allclose(variable, [-(size - 1) / 2])


class Halving(keras.optimizers.SGD):
    def _clip_gradients(self, grads):
        return [gradient / 2 for gradient in grads]


class WithoutHook(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        for gradient, variable in zip(grads, trainable_variables):
            variable.assign_sub(gradient)


class LeavingOut(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        trainable_variables[0].assign_sub(grads[0])
        super().apply(grads[1:], trainable_variables[1:])


class WithoutApply(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        for gradient, variable in grads_and_vars:
            variable.assign_sub(gradient)


def test_custom_clipping_gets_reduced_gradients(rank, size):
    variable = keras.Variable([0.0], name="v")
    optimizer = keras_hvd.DistributedOptimizer(Halving(1.0))
    optimizer.apply([tf.constant([float(rank)])], [variable])
    np.testing.assert_allclose(variable, [-(size - 1) / 4])


@pytest.mark.parametrize("kind", [WithoutHook, LeavingOut, WithoutApply])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_custom_optimizer_that_would_skip_the_reduction(kind, in_graph, several_ranks):
    variables = [keras.Variable([0.0], name=name) for name in ("a", "b")]
    optimizer = keras_hvd.DistributedOptimizer(kind(1.0))
    optimizer.build(variables)

    def step():
        optimizer.apply_gradients([(tf.constant([1.0]), v) for v in variables])

    with pytest.raises(RuntimeError, match="weights would drift apart"):
        tf.function(step)() if in_graph else step()


@pytest.mark.needs_xla
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_ranks_need_not_agree_on_xla(
    steps_per_execution, rank, make_linear, points, difference
):
    """Their buckets have the same names and tensors, compiled or not.

    The updates differ in the last bits, for XLA fuses multiplications and additions.
    """
    keras.utils.set_random_seed(1)
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    model = make_linear(
        optimizer,
        jit_compile=rank % 2 == 0,
        steps_per_execution=steps_per_execution,
    )
    model.fit(
        *(rows[rank::4] for rows in points),
        batch_size=2,
        verbose=0,
        callbacks=[keras_hvd.callbacks.BroadcastGlobalVariables(0)],
    )
    model.train_on_batch(*(rows[rank::4] for rows in points))
    for others in keras_hvd.allgather_object(model.get_weights()):
        assert difference(model.get_weights(), others) < 1e-5


@pytest.mark.needs_xla
def test_compiled_loop_of_ones_own(rank, size):
    variable = keras.Variable([0.0], name="v")
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])

    @tf.function(jit_compile=True)
    def step():
        optimizer.apply([tf.constant([float(rank)])], [variable])

    for _ in range(3):
        step()
    np.testing.assert_allclose(variable.numpy(), [-3 * (size - 1) / 2])


@pytest.mark.needs_xla
@pytest.mark.parametrize("first_traced", ["alone", "inside"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_step_called_alone_and_inside_of_a_compiled_function(
    first_traced, on_gpu, rank, size, request, monkeypatch
):
    """TensorFlow uses one trace for both; on the last rank it is the other one's."""
    if on_gpu:
        request.getfixturevalue("starts")
    monkeypatch.setattr("keras_hvd.backends.buckets.LARGE", 8)
    variables = [keras.Variable([0.0, 0.0], name=name) for name in "abc"]
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(variables)

    @tf.function(autograph=False)
    def step(x):
        optimizer.apply([x, 2.0 * x, 3.0 * x], variables)

    compiled = tf.function(lambda x: step(x), jit_compile=True, autograph=False)
    calls = [step, compiled]
    if (first_traced == "inside") != (rank == size - 1):
        calls.reverse()
    for function in (*calls, *calls):
        function(tf.fill([2], float(rank)))
    for factor, variable in enumerate(variables, 1):
        np.testing.assert_allclose(variable, [-2.0 * factor * (size - 1)] * 2)


@pytest.mark.needs_xla
def test_error_of_a_step_traced_inside_of_a_compiled_function(
    rank, several_ranks, raises_on_all_ranks, monkeypatch
):
    """The second of the three buckets differs, and the third one travels all the same.

    Else ranks that have submitted all at once would wait for it.
    """
    monkeypatch.setattr("keras_hvd.backends.buckets.LARGE", 8)
    names = ["a", "b" if rank == 0 else "other", "c"]
    variables = [keras.Variable([0.0, 0.0], name=name) for name in names]
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(variables)

    @tf.function(autograph=False)
    def step(x):
        optimizer.apply([x, x, x], variables)

    compiled = tf.function(lambda x: step(x), jit_compile=True, autograph=False)
    if rank == 0:
        compiled.get_concrete_function(tf.ones([2]))
    with pytest.raises(tf.errors.FailedPreconditionError) as raised:
        step(tf.ones([2]))
    raises_on_all_ranks(raised.value, "sgd/gradients/1")


@pytest.mark.needs_xla
def test_infinite_gradient_of_one_rank_under_xla(rank, size):
    """All ranks skip the step, as they do without XLA."""
    variable = keras.Variable([0.0], name="v")
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), initial_scale=1.0
    )
    optimizer.build([variable])

    @tf.function(jit_compile=True)
    def step(gradient):
        optimizer.apply([gradient], [variable])

    step(tf.constant([np.inf if rank == size - 1 else 1.0]))
    np.testing.assert_array_equal(variable.numpy(), [0.0])
    step(tf.constant([1.0]))
    np.testing.assert_array_equal(variable.numpy(), [-2.0])


def test_strategy_is_refused(several_ranks):
    variable = keras.Variable([0.0], name="v")
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with (
        tf.distribute.OneDeviceStrategy("cpu:0").scope(),
        pytest.raises(RuntimeError, match="OneDeviceStrategy"),
    ):
        optimizer.apply([tf.constant([1.0])], [variable])
