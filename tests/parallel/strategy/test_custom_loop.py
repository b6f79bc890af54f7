"""Custom loops under keras_hvd.Strategy: the same results on any number of ranks.

The expectations are those of one process, which NumPy computes here for all the data.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
ON_READ = tf.VariableSynchronization.ON_READ


@pytest.fixture(scope="module")
def strategy():
    return keras_hvd.Strategy()


def context():
    return tf.distribute.get_replica_context()


# --- where code runs ------------------------------------------------------------------


def test_a_real_strategy(strategy, rank, size):
    assert isinstance(strategy, tf.distribute.Strategy)
    assert strategy.num_replicas_in_sync == size
    assert not tf.distribute.has_strategy()
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.has_strategy()
        assert tf.distribute.in_cross_replica_context()
        assert context() is None
        with strategy.scope():
            assert tf.distribute.get_strategy() is strategy
    assert not tf.distribute.has_strategy()

    def step():
        assert tf.distribute.get_strategy() is strategy
        assert not tf.distribute.in_cross_replica_context()
        assert context().strategy is strategy
        assert context().num_replicas_in_sync == size
        assert context().devices == strategy.extended.worker_devices
        return context().replica_id_in_sync_group

    assert strategy.run(step).numpy() == rank


def test_strategies_are_not_mixed(strategy):
    other = tf.distribute.OneDeviceStrategy("/device:CPU:0")
    with strategy.scope():
        with pytest.raises(RuntimeError, match="Mixing different"):
            other.run(lambda: 1)
        with pytest.raises(RuntimeError, match="Mixing different"), other.scope():
            pass
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.reduce(SUM, 1.0, axis=None))
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.gather(tf.ones([1]), axis=0))


def test_gradients_may_come_from_a_generator(strategy, rank, size):
    with strategy.scope():
        variables = [keras.Variable([0.0], name=name) for name in ("a", "b")]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)
    gradients = [tf.constant([float(rank)]), tf.constant([1.0])]
    strategy.run(lambda: optimizer.apply((each for each in gradients), variables))
    np.testing.assert_allclose(variables[0], [-sum(range(size))])
    np.testing.assert_allclose(variables[1], [-size])


def test_running(strategy):
    def step(x, times=1):
        return {"product": x * times, "twice": (x + x,)}

    out = strategy.run(step, args=(tf.constant(3),), kwargs={"times": 5})
    assert (out["product"].numpy(), out["twice"][0].numpy()) == (15, 6)
    assert strategy.experimental_local_results(out["product"])[0].numpy() == 15
    out = strategy.extended.call_for_each_replica(step, args=(tf.constant(3),))
    assert out["product"].numpy() == 3
    with pytest.raises(ValueError, match="positional args"):
        strategy.run(step, args=tf.constant(3))


def test_merging(strategy, run, rank, size):
    def merge(other, x, y=0.0):
        assert other is strategy
        assert tf.distribute.in_cross_replica_context()
        return other.reduce(SUM, x, axis=None) + y

    def step(x):
        merged = context().merge_call(merge, args=(x,), kwargs={"y": x})
        assert not tf.distribute.in_cross_replica_context()
        return merged

    mine = tf.constant(float(rank))
    assert strategy.run(run(step), args=(mine,)).numpy() == sum(range(size)) + rank


@pytest.mark.needs_xla
def test_compiled_around_it(strategy, rank, size):
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    def replica_step(x):
        total.assign_add(x)
        return context().all_reduce(SUM, 2 * x)

    @tf.function(jit_compile=True)
    def step(x):
        of_ranks = strategy.run(replica_step, args=(x,))
        return of_ranks, strategy.reduce(MEAN, of_ranks[None], axis=0)

    for times in (1, 2):
        results = step(tf.constant(float(rank)))
        assert [each.numpy() for each in results] == [2 * sum(range(size))] * 2
        assert total.numpy() == times * sum(range(size))


def test_values_of_functions(strategy, rank, size):
    def value(place):
        return tf.constant([place.replica_id_in_sync_group, place.num_replicas_in_sync])

    mine = strategy.experimental_distribute_values_from_function(value)
    assert mine.numpy().tolist() == [rank, size]
    everyones = strategy.gather(mine[None], axis=0).numpy()
    assert everyones.tolist() == [[each, size] for each in range(size)]


def test_logical_devices(strategy):
    x = tf.constant(1.0)
    assert strategy.experimental_assign_to_logical_device(x, 0) is x
    with pytest.raises(NotImplementedError, match="one device per process"):
        strategy.experimental_assign_to_logical_device(x, 1)


def test_a_part_of_the_ranks(rank, size):
    if size < 3:
        pytest.skip("needs at least 3 ranks")
    some = keras_hvd.add_process_set([1, size - 1] if size > 2 else [1])
    if rank in some.ranks:
        strategy = keras_hvd.Strategy(process_set=some)
        assert strategy.num_replicas_in_sync == 2
        place = strategy.run(lambda: context().replica_id_in_sync_group)
        assert place.numpy() == some.ranks.index(rank)
        with strategy.scope():
            variable = tf.Variable(rank)
        assert variable.numpy() == 1
        assert strategy.reduce(SUM, tf.constant(rank), axis=None).numpy() == size
    else:
        with pytest.raises(ValueError, match=f"rank {rank} is not in"):
            keras_hvd.Strategy(process_set=some)
    keras_hvd.remove_process_set(some)


# --- reducing and gathering -----------------------------------------------------------

DTYPES = [
    *(tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64),
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_all_types(strategy, dtype, rank, size):
    def step():
        mine = tf.cast([rank, 1, 3], dtype)
        return context().all_reduce(SUM, mine), context().all_reduce("mean", mine)

    total, mean = strategy.run(step)
    wanted = np.array([sum(range(size)), size, 3 * size])
    assert total.dtype == dtype
    np.testing.assert_array_equal(tf.cast(total, tf.complex128), wanted)
    if dtype.is_integer:
        assert mean.dtype == tf.float64
    np.testing.assert_allclose(tf.cast(mean, tf.complex128), wanted / size, rtol=0.01)
    # A rank has as many rows as its number.
    gathered = strategy.gather(tf.cast(tf.fill([rank, 2], rank), dtype), axis=0)
    rows = [each for each in range(size) for _ in range(each)]
    np.testing.assert_array_equal(tf.cast(gathered, tf.int32)[:, 1], rows)


def test_structures(strategy, run, rank, size):
    @run
    def step(x):
        values = {"a": x, "b": [x * 2, tf.cast(x, tf.float64)]}
        return context().all_reduce(SUM, values)

    total = strategy.run(step, args=(tf.fill([2], float(rank)),))
    expected = float(sum(range(size)))
    assert total["a"].numpy().tolist() == [expected] * 2
    assert total["b"][0].numpy().tolist() == [2 * expected] * 2
    assert total["b"][1].dtype == tf.float64
    mean = strategy.reduce("MEAN", {"x": tf.constant(float(rank)), "y": 1}, axis=None)
    assert mean["x"].numpy() == expected / size
    assert mean["y"].numpy() == 1


def test_large_values_travel_in_parts(strategy, rank, size):
    """A part ends once it has 4 MiB."""
    lengths = [300_000, 700_000, 100_000, 1_200_000, 3]
    values = [tf.fill([n], float(rank + i)) for i, n in enumerate(lengths)]

    @tf.function
    def step():
        return strategy.run(lambda: context().all_reduce(SUM, values))

    for i, (each, length) in enumerate(zip(step(), lengths, strict=True)):
        wanted = np.full(length, sum(range(size)) + i * size)
        np.testing.assert_array_equal(each, wanted)
    parts = [
        [each.shape[0] for each in op.inputs]
        for op in step.get_concrete_function().graph.get_operations()
        if op.type == "KerasHvdAllreduce"
    ]
    assert parts == [lengths[:3], lengths[3:4], lengths[4:]]


def test_slices(strategy, way, run, rank, size):
    if way == "xla":
        pytest.skip("compiled programs have slices of fixed shapes")

    @run
    def step():
        rows = tf.fill([rank + 1, 2], float(rank))
        slices = tf.IndexedSlices(rows, tf.range(rank + 1), tf.constant([8, 2]))
        return [
            tf.convert_to_tensor(each)
            for each in (
                context().all_reduce(SUM, slices),
                *context().all_reduce(MEAN, [slices, tf.constant(1.0)]),
            )
        ]

    total, mean, one = strategy.run(step)
    wanted = np.zeros([8, 2])
    for other in range(size):
        wanted[: other + 1] += other
    np.testing.assert_allclose(total, wanted)
    np.testing.assert_allclose(mean, wanted / size, rtol=1e-6)
    assert one.numpy() == 1.0


def test_reducing_along_an_axis(strategy, rank, size):
    # A rank has as many rows as its number; rank 0 has none.
    everyones = [np.arange(6.0 * r).reshape(r, 2, 3) + r for r in range(size)]
    mine = tf.constant(everyones[rank], tf.float32, [rank, 2, 3])
    rows = np.concatenate([each.reshape(-1, 2, 3) for each in everyones])
    for axis, of_numpy in ((0, 0), ((0, 2), (0, 2)), ([0, 1], (0, 1)), (-3, 0)):
        total = strategy.reduce(SUM, mine, axis=axis)
        np.testing.assert_allclose(total, rows.sum(of_numpy), rtol=1e-5)
        if len(rows):
            mean = strategy.reduce("MEAN", mine, axis=axis)
            np.testing.assert_allclose(mean, rows.mean(of_numpy), rtol=1e-5)
    whole = strategy.reduce(MEAN, tf.range(rank + 1), axis=0)
    elements = [each for r in range(size) for each in range(r + 1)]
    np.testing.assert_allclose(whole, np.mean(elements))

    assert strategy.reduce(SUM, [1, 2, rank], axis=0) == 3 * size + sum(range(size))
    pair = strategy.reduce(MEAN, (mine[..., 0], np.ones([rank + 1])), axis=(0,))
    assert pair[1].numpy() == 1.0

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def of_unknown_shape(x):
        return strategy.reduce(MEAN, x, axis=0)

    np.testing.assert_allclose(
        of_unknown_shape(tf.range(rank + 1.0)), np.mean(elements)
    )


def test_reducing_what_is_wrong(strategy):
    with pytest.raises(TypeError, match="reduce_op must be"):
        strategy.reduce(3, tf.constant(1.0), axis=None)
    with pytest.raises(ValueError, match="'MAX' is not a valid"):
        strategy.reduce("max", tf.constant(1.0), axis=None)
    with pytest.raises(tf.errors.InvalidArgumentError, match="reduction dimension"):
        strategy.reduce(SUM, tf.ones([2]), axis=1)
    with pytest.raises(TypeError, match="string"):
        strategy.reduce(SUM, tf.constant("a"), axis=None)
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        slices = tf.IndexedSlices(tf.ones([1]), tf.constant([0]))
        strategy.gather(slices, axis=0)
    with pytest.raises(ValueError, match="a scalar has none"):
        strategy.gather(tf.constant(1.0), axis=0)
    with pytest.raises(ValueError, match="must be a dimension"):
        strategy.gather(tf.ones([1]), axis=1)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_gathering_along_an_axis(strategy, axis, rank, size):
    shape = [2, 3, 4]
    shape[axis] = rank + 1
    everyones = []
    for other in range(size):
        of_other = list(shape)
        of_other[axis] = other + 1
        everyones.append(np.arange(np.prod(of_other)).reshape(of_other) + other)
    mine = tf.constant(everyones[rank])
    wanted = np.concatenate(everyones, axis)
    np.testing.assert_array_equal(strategy.gather(mine, axis), wanted)

    @tf.function
    def of_tensor_axis(x, axis):
        return strategy.run(lambda: context().all_gather({"x": x}, axis))["x"]

    np.testing.assert_array_equal(of_tensor_axis(mine, tf.constant(axis)), wanted)


# --- gradients ------------------------------------------------------------------------


def test_gradients_through_all_reduce(strategy, run, rank, size):
    @run
    def step(x, weight):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            total = context().all_reduce(SUM, [x, 2 * x])
            mean = context().all_reduce(MEAN, x)
            of_total = tf.reduce_sum((total[0] + total[1]) * weight)
            of_mean = tf.reduce_sum(mean * weight)
        return tape.gradient(of_total, x), tape.gradient(of_mean, x)

    # Every rank's loss has its own weight, and depends on every rank's x.
    of_total, of_mean = strategy.run(
        step, args=(tf.constant([1.0, 2.0]), tf.constant(rank + 1.0))
    )
    weights = sum(range(1, size + 1))
    np.testing.assert_allclose(of_total, [3 * weights] * 2, rtol=1e-6)
    np.testing.assert_allclose(of_mean, [weights / size] * 2, rtol=1e-6)


def test_gradients_through_all_gather(strategy, way, run, rank, size):
    rows = 2 if way == "xla" else rank + 1
    counts = [2] * size if way == "xla" else list(range(1, size + 1))

    @run
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = context().all_gather(x, axis=1)
            weights = tf.range(1.0, float(sum(counts)) + 1)
            loss = tf.reduce_sum(gathered * weights) * (rank + 1.0)
        return tape.gradient(loss, x)

    gradient = strategy.run(step, args=(tf.ones([2, rows]),))
    start = sum(counts[:rank])
    weights = np.arange(start, start + rows) + 1
    wanted = np.broadcast_to(weights * sum(range(1, size + 1)), [2, rows])
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


def test_gradients_of_gradients(strategy, size):
    def step(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = context().all_reduce(SUM, x) ** 3
            first = inner.gradient(y, x)
        return first, outer.gradient(first, x)

    first, second = strategy.run(tf.function(step), args=(tf.constant(2.0),))
    total = 2.0 * size
    np.testing.assert_allclose(first, size * 3 * total**2, rtol=1e-6)
    np.testing.assert_allclose(second, size * size * 6 * total, rtol=1e-6)


# --- training -------------------------------------------------------------------------

ROWS, BATCH = 1000, 64


@pytest.fixture(scope="module")
def points():
    """1,000 rows, which neither batches nor ranks share equally."""
    generator = np.random.default_rng(5)
    x = generator.standard_normal((ROWS, 3)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [0.5]]) + 0.1 * generator.standard_normal(
        (ROWS, 1)
    )
    return x, y.astype("float32")


def trained_by_one_process(x, y, rate=0.1):
    """The weights and the losses of gradient descent, in NumPy."""
    weight, losses = np.zeros((3, 1)), []
    for begin in range(0, ROWS, BATCH):
        rows = slice(begin, begin + BATCH)
        error = x[rows] @ weight - y[rows]
        losses.append(np.mean(error**2))
        weight -= rate * 2 * x[rows].T @ error / len(error)
    return weight, losses


@pytest.mark.parametrize(
    "loop", ["steps", "iterator in a function", "loop in a function"]
)
def test_training(strategy, way, run, loop, points, equal_on_all_ranks):
    if loop != "steps" and way != "graph":
        pytest.skip("that loop is a graph")
    dataset = tf.data.Dataset.from_tensor_slices(points).batch(BATCH)
    dataset = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        weight = tf.Variable(tf.zeros([3, 1]))
        seen = tf.Variable(
            0.0, synchronization=ON_READ, aggregation=tf.VariableAggregation.SUM
        )

    @run
    def replica_step(x, y):
        rows = context().all_reduce(SUM, tf.cast(tf.shape(x)[0], tf.float32))
        with tf.GradientTape() as tape:
            squares = (tf.matmul(x, weight) - y) ** 2
            loss = tf.reduce_sum(squares) / rows
        gradient = context().all_reduce(SUM, tape.gradient(loss, weight))
        weight.assign_sub(0.1 * gradient)
        seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return squares[:, 0]

    def step(batch):
        squares = strategy.run(replica_step, args=batch)
        return strategy.reduce(MEAN, squares, axis=0)

    @tf.function
    def next_step(iterator):
        return step(next(iterator))

    @tf.function
    def epoch():
        losses = tf.TensorArray(tf.float32, 0, dynamic_size=True)
        for batch in dataset:
            losses = losses.write(losses.size(), step(batch))
        return losses.stack()

    if loop == "steps":
        losses = [step(batch).numpy() for batch in dataset]
    elif loop == "iterator in a function":
        iterator = iter(dataset)
        losses = [next_step(iterator).numpy() for _ in range(16)]
    else:
        losses = epoch().numpy()
    wanted_weight, wanted_losses = trained_by_one_process(*points)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-4)
    np.testing.assert_allclose(weight, wanted_weight, atol=1e-5)
    assert strategy.extended.read_var(seen).numpy() == ROWS
    assert equal_on_all_ranks([weight.numpy()])


def test_steps_within_a_loop(strategy, rank, size):
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    def replica_step(x):
        total.assign_add(x)
        if context().all_reduce(SUM, x) > 2.0:
            total.assign_add(context().all_reduce(MEAN, x))

    @tf.function
    def steps(count):
        for i in tf.range(count):
            strategy.run(replica_step, args=(tf.cast(i, tf.float32),))

    for _ in range(2):
        total.assign(0.0)
        steps(4)
        sums = [each * size for each in range(4)]
        wanted = sum(sums) + size * sum(each / size for each in sums if each > 2)
        assert total.numpy() == wanted


def test_ranks_may_trace_more_often_than_others(strategy, rank, size):
    @tf.function
    def step(x, number):
        return strategy.run(lambda: context().all_reduce(SUM, x)) + number

    for i in range(3 + rank):  # a trace for each Python number, without running it
        step.get_concrete_function(tf.constant(1.0), float(i + 10))
    assert step(tf.constant(1.0), 1.0).numpy() == size + 1.0


def metrics_of_points():
    """Metrics, and a function that updates them with rows of `points`."""
    metrics = [
        keras.metrics.MeanSquaredError(),
        keras.metrics.MeanAbsoluteError(),
        keras.metrics.AUC(num_thresholds=20),
    ]

    def update(x, y):
        squares, absolutes, area = metrics
        squares.update_state(y, x[:, :1])
        absolutes.update_state(y, x[:, :1])
        area.update_state(y > 0, tf.sigmoid(x[:, :1]))

    return metrics, update


def test_metrics(strategy, run, points):
    with strategy.scope():
        metrics, update = metrics_of_points()
    step = run(update)
    dataset = tf.data.Dataset.from_tensor_slices(points).batch(500)
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=batch)
    whole, update = metrics_of_points()
    update(*points)
    for metric, of_all in zip(metrics, whole, strict=True):
        for variable, expected in zip(metric.variables, of_all.variables, strict=True):
            read = strategy.extended.read_var(variable.value)
            np.testing.assert_allclose(read, expected.numpy(), rtol=1e-4)


def test_a_module(strategy, way, run, rank, equal_on_all_ranks):
    # Built in the first step, with another seed on every rank.
    class Layers(tf.Module):
        def __init__(self):
            self.weights = None

        def __call__(self, x):
            if self.weights is None:
                random = functools.partial(tf.random.normal, seed=rank)
                self.weights = [
                    tf.Variable(lambda: random([4, 8]), name="first"),
                    tf.Variable(lambda: random([8, 1]), name="second"),
                ]
            return tf.tanh(x @ self.weights[0]) @ self.weights[1]

    layers = Layers()
    if way == "xla":
        # TensorFlow makes no variables in compiled functions.
        strategy.run(layers, args=(tf.ones([1, 4]),))

    @run
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layers(x) ** 2)
        gradients = tape.gradient(loss, layers.weights)
        for weight, gradient in zip(
            layers.weights, context().all_reduce(MEAN, gradients), strict=True
        ):
            weight.assign_sub(0.1 * gradient)
        return loss

    losses = [
        strategy.reduce(MEAN, strategy.run(step, args=(tf.ones([2, 4]),)), axis=None)
        for _ in range(5)
    ]
    assert losses[-1] < losses[0]
    assert equal_on_all_ranks([each.numpy() for each in layers.weights])


def test_slots_and_updates(strategy, rank, size):
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])
        with strategy.extended.colocate_vars_with(weight):
            slot = tf.Variable(tf.zeros([2]), trainable=False)

    def update(weight, gradient, slot):
        slot.assign(0.5 * slot + gradient)
        return weight.assign_sub(0.1 * slot)

    @tf.function
    def step(gradient):
        def merge(strategy, gradient):
            total = strategy.extended.batch_reduce_to(SUM, [(gradient, weight)])[0]
            return strategy.extended.update(weight, update, args=(total, slot))

        return context().merge_call(merge, args=(gradient,))

    for _ in range(2):
        strategy.run(step, args=(tf.fill([2], float(rank)),))
    total = sum(range(size))
    np.testing.assert_allclose(slot, [1.5 * total] * 2)
    np.testing.assert_allclose(weight, np.array([1.0, 2.0]) - 0.25 * total, rtol=1e-5)


def test_accumulation_in_eager_steps(strategy, rank, size):
    """A step that only accumulates reduces nothing, and nothing is missed."""
    with strategy.scope():
        variable = keras.Variable([0.0], name="accumulated")
        optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        optimizer.build([variable])
    seen = []
    for _ in range(4):
        gradient = tf.constant([rank + 1.0])
        strategy.run(lambda g: optimizer.apply([g], [variable]), args=(gradient,))
        seen.append(float(variable.numpy()[0]))
    of_all = size * (size + 1) / 2
    assert seen == [0.0, -of_all, -of_all, -2 * of_all]


def test_ranks_draw_different_random_numbers(strategy, size):
    """With one seed each drops elements of its own."""
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=3)
    kept = strategy.run(lambda: dropout(tf.ones([1000]), training=True))
    of_ranks = keras_hvd.allgather_object(kept.numpy().tobytes())
    assert len({*of_ranks}) == size


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "made_in_the_step"])
def test_ranks_draw_different_numbers_without_a_generator(
    is_there, strategy, way, run, size
):
    """Though all set one seed. XLA takes no seed of tf.random."""
    keras.utils.set_random_seed(42)
    if is_there:
        keras.random.normal(())
    draws = {"keras": lambda: keras.random.normal((3,))}
    if way != "xla":
        draws["tf"] = lambda: tf.random.normal([3])
    step = run(lambda: {name: draw() for name, draw in draws.items()})
    for _ in range(2):
        drawn = strategy.run(step)
        of_ranks = keras_hvd.allgather_object(
            {name: each.numpy().tobytes() for name, each in drawn.items()}
        )
        for name in draws:
            assert len({each[name] for each in of_ranks}) == size
