"""Variables of keras_hvd.Strategy: equal at the start, aggregated as they say."""

import copy
import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.strategy import variables

NONE, SUM, MEAN, ONLY_FIRST = (
    tf.VariableAggregation.NONE,
    tf.VariableAggregation.SUM,
    tf.VariableAggregation.MEAN,
    tf.VariableAggregation.ONLY_FIRST_REPLICA,
)
ON_READ = tf.VariableSynchronization.ON_READ


@pytest.fixture(scope="module")
def strategy():
    return keras_hvd.Strategy()


@pytest.fixture
def make(strategy):
    """Makes a variable in the strategy's scope."""

    def make(*arguments, **named):
        with strategy.scope():
            return tf.Variable(*arguments, **named)

    return make


@pytest.fixture
def no_collective(counters):
    """Asserts that the test, after the call, needs no other rank."""
    before = []
    yield lambda: before.append(counters().tensors)
    assert [counters().tensors] == before


def aggregate(aggregation, of_ranks, own):
    """The aggregate of the ranks' values."""
    return {
        NONE: lambda: own,
        SUM: lambda: sum(of_ranks),
        MEAN: lambda: sum(of_ranks) / len(of_ranks),
        ONLY_FIRST: lambda: of_ranks[0],
    }[aggregation]()


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"),
        *("uint64", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128"),
    ],
)
def test_every_type_starts_as_on_the_first_rank(make, rank, dtype):
    given = tf.cast([rank, rank + 1], dtype)
    assert make(given).numpy().tolist() == tf.cast([0, 1], dtype).numpy().tolist()


def test_strings_start_as_on_the_first_rank(make, rank):
    assert make(["a" * (3 * rank), "b\0ü"]).numpy().tolist() == [b"", "b\0ü".encode()]
    assert make("x").numpy() == b"x"


def test_initializers(make, strategy, rank):
    variable = make(lambda: tf.fill([2], rank), name="weight")
    assert variable.numpy().tolist() == [0, 0]
    assert variable.name == "weight:0"
    assert type(variable).__name__ == "ResourceVariable"
    assert strategy.extended.variable_created_in_scope(variable)
    assert not strategy.extended.variable_created_in_scope(tf.Variable(1))
    assert make(1.0, trainable=False).trainable is False


@pytest.mark.usefixtures("several_ranks")
def test_different_shapes_are_an_error(make, rank):
    with pytest.raises(tf.errors.FailedPreconditionError, match="variable/weight"):
        make(tf.ones([2 + rank]), name="weight")


class Lazy(tf.Module):
    """Makes its variable when its method runs first."""

    def __init__(self, initial_value, aggregation):
        self.initial_value = initial_value
        self.aggregation = aggregation
        self.variable = None

    @tf.function
    def add_one(self):
        if self.variable is None:
            self.variable = tf.Variable(
                self.initial_value(), aggregation=self.aggregation
            )
        return self.variable.assign_add(tf.constant([1.0, 1.0]))


@pytest.mark.parametrize("aggregation", [NONE, SUM])
@pytest.mark.parametrize("kind", ["array", "initializer", "tensor of the function"])
def test_made_in_a_function(strategy, rank, size, kind, aggregation):
    value = {
        "array": lambda: np.full([2], rank + 3, np.float32),
        "initializer": lambda: lambda: tf.fill([2], float(rank + 3)),
        "tensor of the function": lambda: tf.fill([2], float(rank + 3)),
    }[kind]
    module = Lazy(value, aggregation)
    more = size if aggregation == SUM else 1
    for times in (1, 2):
        result = strategy.run(module.add_one)
        assert result.numpy().tolist() == [3.0 + times * more] * 2
    assert module.variable.aggregation == aggregation
    assert strategy.extended.variable_created_in_scope(module.variable)


def test_made_while_run(strategy, rank):
    made = []
    strategy.run(lambda: made.append(tf.Variable([rank, 5])))
    assert made[0].numpy().tolist() == [0, 5]


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_assigning_aggregates(strategy, make, run, method, rank, size):
    of_ranks = [np.arange(2.0) + each for each in range(size)]
    mine = tf.constant(of_ranks[rank], tf.float32)
    aggregations = (NONE, SUM, MEAN, ONLY_FIRST)
    several = [make(tf.ones([2]), aggregation=each) for each in aggregations]
    step = run(lambda x: [getattr(each, method)(x) for each in several] and None)
    strategy.run(step, args=(mine,))
    for aggregation, variable in zip(aggregations, several, strict=True):
        delta = aggregate(aggregation, of_ranks, of_ranks[rank])
        wanted = {"assign": delta, "assign_add": 1 + delta, "assign_sub": 1 - delta}
        np.testing.assert_allclose(variable, wanted[method], rtol=1e-6)


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, ONLY_FIRST])
def test_numbers_count_once(strategy, make, run, aggregation):
    variable = make(0.0, aggregation=aggregation)
    strategy.run(run(lambda: variable.assign_add(2.0)))
    assert variable.numpy() == 2.0
    strategy.run(run(lambda: variable.assign(5)))
    assert variable.numpy() == 5.0


def test_numbers_that_differ_are_the_first_ranks(strategy, make, rank):
    variable = make(0, aggregation=SUM)
    strategy.run(lambda: variable.assign_add(rank + 1))
    assert variable.numpy() == 1


def test_integers(strategy, make, rank, size):
    total, mean = make(0, aggregation=SUM), make(0, aggregation=MEAN)
    strategy.run(lambda: total.assign_add(tf.constant(rank)))
    assert total.numpy() == sum(range(size))
    with pytest.raises(ValueError, match="MEAN, which assign cannot"):
        strategy.run(lambda: mean.assign(tf.constant(rank)))
    mean.assign(3)
    assert mean.numpy() == 3


def test_assigning_a_part(strategy, make, rank, size):
    variable = make(tf.zeros([3]), aggregation=SUM)
    strategy.run(lambda: variable[1:].assign([float(rank), 1.0]))
    assert variable.numpy().tolist() == [0.0, sum(range(size)), size]


def test_scattering(strategy, make, way, run, rank, size):
    # The ranks have different numbers of rows.
    def slices():
        rows = tf.fill([rank + 1, 2], 1.0)
        return tf.IndexedSlices(rows, tf.range(rank + 1), tf.constant([4, 2]))

    total = make(tf.zeros([4, 2]), aggregation=SUM)
    mean = make(tf.zeros([4, 2]), aggregation=MEAN)
    first = make(tf.zeros([4, 2]), aggregation=ONLY_FIRST)
    own = make(tf.zeros([4, 2]))
    if way == "xla":
        pytest.skip("compiled programs have slices of fixed shapes")

    @run
    def step():
        total.scatter_add(slices())
        mean.scatter_sub(slices())
        first.scatter_update(slices())
        own.scatter_add(slices())

    strategy.run(step)
    rows = np.array([max(size - row, 0) for row in range(4)])
    np.testing.assert_allclose(total.numpy()[:, 0], rows)
    np.testing.assert_allclose(mean.numpy()[:, 1], -rows / size, rtol=1e-6)
    assert first.numpy()[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert own.numpy()[:, 0].sum() == rank + 1


def test_scattering_that_no_aggregation_applies_to(strategy, make):
    variable = make(tf.zeros([4]), aggregation=SUM)
    slices = tf.IndexedSlices(tf.ones([1]), tf.constant([0]))
    for method in ("min", "max", "mul", "div", "update"):
        with pytest.raises(NotImplementedError, match=f"scatter_{method} cannot"):
            strategy.run(getattr(variable, f"scatter_{method}"), args=(slices,))
    for method in ("add", "sub", "min", "max", "update"):
        with pytest.raises(NotImplementedError, match=f"scatter_nd_{method} cannot"):
            strategy.run(
                getattr(variable, f"scatter_nd_{method}"), args=([[0]], tf.ones([1]))
            )
    with pytest.raises(NotImplementedError, match="batch_scatter_update cannot"):
        strategy.run(variable.batch_scatter_update, args=(slices,))
    # Outside of replicas all of it is as usual.
    variable.scatter_update(slices)
    variable.scatter_nd_add([[0]], tf.ones([1]))
    assert variable.numpy().tolist() == [2.0, 0.0, 0.0, 0.0]


def test_assignments_outside_of_replicas(strategy, make, no_collective):
    several = [make(0.0, aggregation=each) for each in (NONE, SUM, MEAN, ONLY_FIRST)]
    no_collective()
    for variable in several:
        variable.assign_add(1.0)
        with strategy.scope():
            variable.assign_add(1.0)
            strategy.extended.update(
                variable, lambda each, x: each.assign_add(x), args=(1.0,)
            )

        def step(variable=variable):
            def merged(strategy, x):
                variable.assign_add(x)
                strategy.extended.update(
                    variable, lambda each: each.assign_add(x), group=False
                )

            context = tf.distribute.get_replica_context()
            context.merge_call(merged, args=(1.0,))
            with variables.equal_values():
                variable.assign_add(1.0)
            strategy.extended.update(variable, lambda each: each.assign_add(1.0))

        strategy.run(step)
        assert variable.numpy() == 7.0


def test_the_variable_as_an_argument(strategy, make, size):
    # TensorFlow has one trace for all variables of a shape and type.
    @tf.function
    def add(variable):
        variable.assign_add(tf.constant(1.0))

    plain, total = make(0.0), make(0.0, aggregation=SUM)
    for variable in itertools.chain([plain, total] * 2):
        strategy.run(add, args=(variable,))
    assert plain.numpy() == 2.0
    assert total.numpy() == 2.0 * size


def test_another_strategys_variable_is_an_error(make):
    variable = make(0.0, aggregation=SUM)
    other = tf.distribute.OneDeviceStrategy("/device:CPU:0")
    with pytest.raises(RuntimeError, match="Mixing different"):
        other.run(lambda: variable.assign(tf.constant(1.0)))


@pytest.mark.parametrize("aggregation", [SUM, MEAN, ONLY_FIRST])
def test_on_read(strategy, make, run, aggregation, rank, size):
    variable = make(0.0, synchronization=ON_READ, aggregation=aggregation)
    assert variable.trainable is False

    def step():
        variable.assign_add(tf.constant(rank + 1.0))
        variable.assign_add(tf.constant(rank + 1.0))
        return variable.read_value()

    assert strategy.run(run(step)).numpy() == 2 * rank + 2
    assert variable.numpy() == 2 * rank + 2
    wanted = aggregate(aggregation, [2 * each + 2 for each in range(size)], None)
    assert strategy.extended.read_var(variable).numpy() == wanted
    assert strategy.reduce("SUM", variable, axis=None) == size * (size + 1)


def test_on_read_is_this_ranks_everywhere(
    strategy, make, rank, tmp_path, no_collective
):
    variable = make(0.0, synchronization=ON_READ, aggregation=SUM)
    no_collective()
    with strategy.scope():
        variable.assign(float(rank))
        assert variable.numpy() == variable.read_value() == rank
        variable.assign_add(1.0)
    assert variable + 0.0 == rank + 1.0
    checkpoint = tf.train.Checkpoint(variable=variable)
    path = checkpoint.write(str(tmp_path / f"rank {rank}"))
    variable.assign(0.0)
    checkpoint.read(path).assert_consumed()
    assert variable.numpy() == rank + 1.0


def test_read_var(strategy, make):
    assert strategy.extended.read_var(make(3.0, aggregation=SUM)).numpy() == 3.0
    with pytest.raises(ValueError, match="none over all of them"):
        strategy.extended.read_var(make(0.0, synchronization=ON_READ))


def test_no_synchronization_is_refused(make):
    with pytest.raises(ValueError, match="weight.*the copies need a"):
        make(0.0, synchronization=tf.VariableSynchronization.NONE, name="weight")


def test_colocation(strategy, make):
    variable = make(1.0)
    with strategy.scope():
        with strategy.extended.colocate_vars_with(variable):
            slot = tf.Variable(2.0)
        assert slot.device == variable.device
        with pytest.raises(ValueError, match="created in the scope"):
            strategy.extended.colocate_vars_with(tf.constant(1.0))
    assert strategy.extended.value_container(variable) is variable
    assert strategy.experimental_local_results(variable) == (variable,)


def test_checkpoints_are_plain(strategy, make, rank, tmp_path, no_collective):
    many = [make([1.0, 2.0], aggregation=each) for each in (NONE, SUM, MEAN)]
    no_collective()
    if rank == 0:  # alone
        path = tf.train.Checkpoint(many=many).write(str(tmp_path / "saved"))
        names = [name for name, _ in tf.train.list_variables(path)]
        assert sum("VARIABLE_VALUE" in name for name in names) == 3
        plain = [tf.Variable([0.0, 0.0]) for _ in many]
        tf.train.Checkpoint(many=plain).read(path).assert_consumed()
        assert [each.numpy().tolist() for each in plain] == [[1.0, 2.0]] * 3


def test_restoring_on_creation(strategy, rank, tmp_path):
    saved = tf.Module()
    saved.weight = tf.Variable([1.0, 2.0])
    path = tf.train.Checkpoint(module=saved).write(str(tmp_path / f"rank {rank}"))
    module = tf.Module()
    status = tf.train.Checkpoint(module=module).read(path)
    with strategy.scope():
        module.weight = tf.Variable([0.0, 0.0], aggregation=MEAN)
    assert module.weight.numpy().tolist() == [1.0, 2.0]
    status.assert_consumed()


def test_saved_models_are_plain(make, rank, tmp_path, no_collective):
    module = tf.Module()
    module.weight = make([1.0, 2.0], aggregation=MEAN)
    module.times = tf.function(
        lambda x: x * module.weight, input_signature=[tf.TensorSpec([2])]
    )
    no_collective()
    path = str(tmp_path / f"rank {rank}")
    tf.saved_model.save(module, path)
    loaded = tf.saved_model.load(path)
    assert loaded.times(tf.constant([2.0, 3.0])).numpy().tolist() == [2.0, 6.0]
    assert loaded.weight.numpy().tolist() == [1.0, 2.0]


def test_copies(strategy, make, size):
    with strategy.scope():
        other = copy.deepcopy(make(0.0, aggregation=SUM))
    strategy.run(lambda: other.assign_add(tf.constant(1.0)))
    assert other.numpy() == size
    assert copy.deepcopy(strategy) is strategy


def test_in_a_graph(rank, size):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        strategy = keras_hvd.Strategy()
        with strategy.scope():
            several = [
                tf.Variable(float(rank + 1), name="same", aggregation=each)
                for each in (NONE, SUM)
            ]
        step = strategy.run(
            lambda: [each.assign_add(tf.constant(1.0)) for each in several]
        )
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(several) == [1.0, 1.0]
        assert session.run(step) == [2.0, 1.0 + size]
