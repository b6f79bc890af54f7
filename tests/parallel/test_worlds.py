"""Functions traced in one job that run in the next: they are right, or an error.

A process may leave a job and join another one, and keeps its compiled functions, models
and strategies. Here the ranks train in parts first, and then all together, or the other
way round.
"""

import copy
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd import Average, Sum
from keras_hvd.backends import equal_start as neutral
from keras_hvd.backends.tensorflow.gradients import equal_start

pytestmark = pytest.mark.usefixtures("several_ranks", "back_in_whole_job")


@pytest.fixture
def back_in_whole_job(counters) -> Iterator[None]:
    if "KERAS_HVD_RENDEZVOUS" in os.environ:
        pytest.skip("parts of ranks that may be on several hosts take mpirun")
    keras.utils.clear_session()
    assert counters().lost_wakes == 0
    yield
    join(None)


def join(members: list[int] | None) -> None:
    """Leaves the job, and joins one of these launched ranks; None: of all."""
    keras_hvd.shutdown()
    keras_hvd.init(comm=members)


@pytest.fixture
def part(rank, size) -> list[int]:
    """The members of this rank's part of the job: all but the last, or it alone."""
    return [rank] if rank == size - 1 else [*range(size - 1)]


# ---- Collectives and their gradients, each with NumPy's result for all ranks' inputs


def rows_of(rank: int) -> np.ndarray:
    return np.array([[1.0 + rank], [3.0 * rank - 1.0]], np.float32)


def uneven_of(rank: int) -> np.ndarray:
    return np.arange(7, dtype=np.float32)[:, None] + rank


def dense(rank):
    return keras_hvd.allreduce(rows_of(rank), op=Average, name="dense")


def slices(rank):
    of_rank = tf.IndexedSlices(
        tf.constant(rows_of(rank)), tf.constant([1, 2]), tf.constant([4, 1])
    )
    return tf.convert_to_tensor(keras_hvd.allreduce(of_rank, op=Average, name="slices"))


def mean_of_slices(ranks, rank):
    mean = np.mean([rows_of(each) for each in ranks], 0)
    return np.concatenate([[[0]], mean, [[0]]])


def gradient_of(function: Callable, given: np.ndarray) -> tf.Tensor:
    with tf.GradientTape() as tape:
        x = tf.constant(given)
        tape.watch(x)
        loss = function(x)
    return tape.gradient(loss, x)


def gradient_of_allgather(rank):
    def loss(x):
        rows = keras_hvd.allgather(x, name="allgather")
        weights = tf.range(tf.cast(tf.shape(rows)[0], tf.float32))
        return tf.reduce_sum(rows * weights[:, None])

    return gradient_of(loss, rows_of(rank))


def gradient_of_reducescatter(rank):
    def loss(x):
        return tf.reduce_sum(keras_hvd.reducescatter(x, op=Sum, name="scatter") ** 2)

    return gradient_of(loss, uneven_of(rank))


def gradient_of_broadcast(rank):
    def loss(x):
        root = keras_hvd.size() - 1
        return tf.reduce_sum(keras_hvd.broadcast(x, root, name="broadcast")) * 2

    return gradient_of(loss, rows_of(rank))


def place(rank):
    return tf.stack([keras_hvd.size_op(), keras_hvd.rank_op()])


CASES = {
    "dense": (dense, lambda ranks, me: np.mean([rows_of(each) for each in ranks], 0)),
    "slices": (slices, mean_of_slices),
    "allgather": (
        gradient_of_allgather,
        lambda ranks, me: np.arange(2.0)[:, None] + 2 * ranks.index(me),
    ),
    "reducescatter": (
        gradient_of_reducescatter,
        lambda ranks, me: 2 * len(ranks) * sum(uneven_of(each) for each in ranks),
    ),
    "place": (place, lambda ranks, me: [len(ranks), ranks.index(me)]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_reads_the_job_when_it_runs(name, part, rank, size):
    function, expected = CASES[name]
    step = tf.function(lambda: function(rank), autograph=False)
    for members in part, [*range(size)], [rank], [*range(size)]:
        join(members)
        np.testing.assert_allclose(step(), expected(members, rank), rtol=1e-6)
    assert step.experimental_get_tracing_count() == 1


def test_a_broadcasts_gradient_is_for_who_is_the_root_now(rank, size):
    step = tf.function(lambda: gradient_of_broadcast(rank), autograph=False)
    # Traced by each rank as the root of its own job.
    join([rank])
    np.testing.assert_array_equal(step(), np.full((2, 1), 2))
    join(None)
    np.testing.assert_array_equal(step(), np.full((2, 1), 2 if rank == 0 else 0))


# Those that compile to a program for a job of this size only.
OF_ONE_SIZE = {"slices", "allgather", "reducescatter", "place"}


@pytest.mark.needs_xla
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_program_is_right_or_says_where_it_was_compiled(
    name, part, rank, size
):
    function, expected = CASES[name]
    step = tf.function(lambda: function(rank), autograph=False, jit_compile=True)
    for members in part, part:
        join(members)
        np.testing.assert_allclose(step(), expected(members, rank), rtol=1e-6)
    before = f"traced by rank {keras_hvd.rank()} of {keras_hvd.size()}, "
    join(None)
    if name not in OF_ONE_SIZE:
        np.testing.assert_allclose(step(), expected([*range(size)], rank), rtol=1e-6)
        return
    with pytest.raises(tf.errors.FailedPreconditionError) as raised:
        step()
    assert before in str(raised.value)
    assert f"is run by rank {rank} of {size} of another job" in str(raised.value)
    assert "Trace it again" in str(raised.value)
    # The collectives that the program had started have ended, and the job goes on.
    assert float(keras_hvd.allreduce(1.0, op=Sum)) == size
    join(part)
    np.testing.assert_allclose(step(), expected(part, rank), rtol=1e-6)


def test_synchronized_statistics_have_the_gradient_of_all_rows_there_are(part, rank):
    layer = keras_hvd.SyncBatchNormalization()
    layer.build((None, 1))
    step = tf.function(
        lambda: gradient_of(
            lambda x: tf.reduce_sum(layer(x, training=True) ** 3), rows_of(rank)
        ),
        autograph=False,
    )
    for members in None, [rank]:
        join(members)
        ranks = [*range(keras_hvd.size())] if members is None else members
        plain = keras.layers.BatchNormalization()
        plain.build((None, 1))
        rows = np.concatenate([rows_of(each) for each in ranks])
        whole = gradient_of(
            lambda x, layer=plain: tf.reduce_sum(layer(x, training=True) ** 3), rows
        )
        own = whole[2 * ranks.index(rank) :][:2]
        # Every rank's loss is one of the terms.
        np.testing.assert_allclose(step(), own, rtol=1e-3, atol=1e-4)


def test_local_gradients_are_divided_by_the_size_there_is(rank, size):
    local = tf.Variable(1.0)

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as plain:
            loss = local * (rank + 1)
        tape = keras_hvd.DistributedGradientTape(plain)
        tape.register_local_source(local)
        return tape.gradient(loss, local)

    assert float(step()) == pytest.approx((rank + 1) / size)
    join([rank])
    assert float(step()) == rank + 1


def test_a_warmup_begins_at_the_rate_of_the_job(rank, size):
    begin = 0.4
    join([rank])
    schedule = keras_hvd.warmup_schedule(begin, warmup_steps=4)
    rate = tf.function(lambda step: schedule(step), autograph=False)
    first = tf.constant(0)
    assert float(rate(first)) == pytest.approx(begin)
    join(None)
    wanted = begin * (1 + (size - 1) / 4) / size
    assert float(rate(first)) == pytest.approx(wanted)
    assert float(schedule(first)) == pytest.approx(wanted)
    saved = keras.optimizers.schedules.serialize(schedule)
    assert saved["class_name"] == "PolynomialDecay"
    loaded = keras.optimizers.schedules.deserialize(saved)
    copied = pickle.loads(pickle.dumps(schedule))
    for each in loaded, copied, copy.deepcopy(schedule):
        assert float(each(first)) == pytest.approx(wanted)


# ---- Steps that were traced by a rank alone, with nothing to reduce


def own_rows(rank: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rank).normal(size=(12, 3)).astype("float32")
    return x, x.sum(1, keepdims=True)


def linear(optimizer: keras.optimizers.Optimizer, **arguments) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, "tanh"), keras.layers.Dense(1)]
    )
    for weight in model.weights:
        seed = np.random.default_rng(len(weight.shape))
        weight.assign(seed.normal(size=weight.shape))
    model.compile(optimizer, "mse", **arguments)
    return model


def plain_steps(size: int) -> list[np.ndarray]:
    """Weights that one process has after rank 0's own rows, and then all ranks'."""
    model = linear(keras.optimizers.SGD(0.05))
    model.fit(*own_rows(0), batch_size=4, shuffle=False, verbose=0)
    of_ranks = [
        [array.reshape(3, 4, -1) for array in own_rows(rank)] for rank in range(size)
    ]
    x, y = (
        np.concatenate(arrays, 1).reshape(3 * 4 * size, -1) for arrays in zip(*of_ranks)
    )
    model.fit(x, y, batch_size=4 * size, shuffle=False, verbose=0)
    return model.get_weights()


JIT = pytest.mark.parametrize(
    "jit_compile", [False, pytest.param(True, marks=pytest.mark.needs_xla)]
)


def callbacks() -> list[keras.callbacks.Callback]:
    return [keras_hvd.callbacks.BroadcastGlobalVariables(0)]


@JIT
def test_fit_with_callbacks_traces_its_steps_for_the_new_job(
    jit_compile, rank, size, equal_on_all_ranks
):
    join([rank])
    model = linear(
        keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)),
        jit_compile=jit_compile,
    )
    model.fit(*own_rows(rank), batch_size=4, shuffle=False, verbose=0)
    join(None)
    fit = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": callbacks()}
    model.fit(*own_rows(rank), **fit)
    for weight, expected in zip(model.get_weights(), plain_steps(size), strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-5)
    assert equal_on_all_ranks(model.get_weights())
    # In a job like it nothing is traced again.
    step = model.train_function
    join(None)
    model.fit(*own_rows(rank), **fit)
    assert model.train_function is step
    assert equal_on_all_ranks(model.get_weights())
    # And back again.
    join([rank])
    model.fit(*own_rows(rank), **fit)
    assert model.train_function is not step


@JIT
def test_fit_without_callbacks_traces_its_steps_for_the_new_job(
    jit_compile, rank, equal_on_all_ranks
):
    join([rank])
    model = linear(
        keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)),
        jit_compile=jit_compile,
    )
    ways = (
        lambda: model.fit(*own_rows(rank), batch_size=4, verbose=0),
        lambda: model.train_on_batch(*(array[:4] for array in own_rows(rank))),
    )
    for train in ways:
        train()
    for train in reversed(ways):
        join([rank])
        train()
        join(None)
        keras_hvd.broadcast_variables(model.weights, root_rank=0)
        before = model.get_weights()
        train()
        assert equal_on_all_ranks(model.get_weights())
        assert any((model.get_weights()[0] != before[0]).ravel())


@pytest.mark.parametrize("way", ["callback", "strategy"])
def test_a_callback_writes_on_the_first_rank_of_the_job_there_is(
    way, part, rank, size, tmp_path
):
    """A rank that was another in one job may be the first of the next one."""
    log = tmp_path / "log.csv"
    logger = keras.callbacks.CSVLogger(log)

    def writes() -> bool:
        log.unlink(missing_ok=True)
        if way == "strategy":
            with keras_hvd.Strategy().scope():
                model = linear(keras.optimizers.SGD(0.05))
            model.fit(*own_rows(0), verbose=0, callbacks=[logger])
        else:
            optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
            model = linear(optimizer)
            model.fit(*own_rows(rank), verbose=0, callbacks=[*callbacks(), logger])
        return log.exists()

    assert writes() == (rank == 0)
    join(part)
    assert writes() == (rank in (0, size - 1))
    join(None)
    assert writes() == (rank == 0)


@pytest.mark.parametrize("way", ["evaluate", "test_on_batch", "predict_on_batch"])
def test_what_does_not_train_is_traced_for_the_new_job_too(way, rank, size):
    class Sums(keras.Model):
        def call(self, x):
            return keras_hvd.allreduce(x, op=Sum, name="x") / keras_hvd.size()

        def test_step(self, data):
            return {"mean": tf.reduce_mean(self(data[0]))}

    model = Sums()
    model.compile()
    x = np.full((4, 1), rank, "float32")
    ways = {
        "evaluate": lambda: model.evaluate(x, x, verbose=0),
        "test_on_batch": lambda: model.test_on_batch(x, x),
        "predict_on_batch": lambda: model.predict_on_batch(x)[0, 0],
    }
    join([rank])
    assert float(np.squeeze(ways[way]())) == rank
    join(None)
    assert float(np.squeeze(ways[way]())) == (size - 1) / 2


@pytest.mark.parametrize("loss_scaling", [False, True])
def test_a_loop_of_ones_own_says_so_too(loss_scaling, rank, size):
    variable = keras.Variable(2.0)
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    if loss_scaling:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(variable.value * (rank + 1.0))
        optimizer.apply([tape.gradient(loss, variable.value)], [variable])

    @tf.function(autograph=False)
    def step_of_tape():
        with tf.GradientTape() as tape:
            loss = variable.value * (rank + 1.0)
        tape = keras_hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, variable.value)

    join([rank])
    step()
    assert float(step_of_tape()) == rank + 1
    join(None)
    for each in step, step_of_tape:
        with pytest.raises(tf.errors.FailedPreconditionError, match="rank 0 of 1, and"):
            each()
    # Eagerly nothing is kept.
    expected = 1 + (size - 1) / 2
    assert float(step_of_tape.python_function()) == pytest.approx(expected)
    join([rank])
    assert float(step_of_tape()) == rank + 1


def test_a_job_of_one_step_compares_weights_before_it_ends(rank, size, monkeypatch):
    """The comparison of a rank may begin when another one leaves."""
    join(None)
    has_stepped = threading.Event()

    plain = neutral.compare

    def late(*args):
        if rank == size - 1:
            has_stepped.wait(30)
        plain(*args)

    monkeypatch.setattr(neutral, "compare", late)
    # However long another rank has no core.
    monkeypatch.setattr(equal_start, "_PATIENCE_SECONDS", 60)
    variable = keras.Variable(2.0 + rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with tf.GradientTape() as tape:
            loss = variable.value * 1.0
        keras_hvd.DistributedGradientTape(tape).gradient(loss, variable.value)
        if rank == size - 1:
            threading.Timer(0.2, has_stepped.set).start()
        join([rank])
    texts = [str(each.message) for each in caught]
    is_told = any("begun to train with different weights" in each for each in texts)
    assert is_told == (rank == 0 and size > 1)


def test_a_session_says_so_too(rank):
    join([rank])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = x * x
        gradient = keras_hvd.DistributedGradientTape(tape).gradient(loss, x)
        assert session.run(gradient) == 6
        join(None)
        with pytest.raises(tf.errors.FailedPreconditionError, match="rank 0 of 1, and"):
            session.run(gradient)


# ---- Strategies and process sets


def test_a_strategy_is_for_one_job(rank, size):
    join([rank])
    strategy = keras_hvd.Strategy()
    with strategy.scope():
        model = linear(keras.optimizers.SGD(0.05))
    model.fit(*own_rows(rank), batch_size=4, verbose=0)
    step = tf.function(lambda: strategy.run(lambda: tf.constant(1.0)), autograph=False)
    step()
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
    join(None)
    made = f"made by rank 0 of 1, and is used by rank {rank} of {size}, in another job"
    for use in (
        lambda: strategy.scope().__enter__(),
        lambda: strategy.run(lambda: tf.constant(1.0)),
        lambda: model.fit(*own_rows(rank), batch_size=4, verbose=0),
        lambda: model.predict(own_rows(rank)[0], verbose=0),
        lambda: model.train_on_batch(*own_rows(rank)),
        lambda: list(data),
    ):
        with pytest.raises(RuntimeError, match=made):
            use()
    with pytest.raises(tf.errors.FailedPreconditionError, match="rank 0 of 1, and"):
        step()
    assert keras_hvd.Strategy() is not strategy
    join([rank])
    assert keras_hvd.Strategy() is strategy
    model.fit(*own_rows(rank), batch_size=4, verbose=0)


# ---- Datasets, whose parts are those of one job


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> str:
    folder = keras_hvd.broadcast_object(str(tmp_path_factory.mktemp("lines")), 0)
    if keras_hvd.rank() == 0:
        for name in "abcdef":
            Path(folder, f"{name}.txt").write_text(f"{name}1\n{name}2\n")
    keras_hvd.barrier()
    return f"{folder}/*.txt"


def counted() -> tf.data.Dataset:
    return tf.data.Dataset.range(24)


DATASETS = {
    "shard": lambda lines: keras_hvd.data.shard(counted().shuffle(24, seed=1)),
    "shard by filter": lambda lines: keras_hvd.data.shard(
        counted().filter(lambda number: number >= 0)
    ),
    "distribute": lambda lines: keras_hvd.data.distribute(counted(), 12),
    "even": lambda lines: keras_hvd.data.even(
        counted().take(6 + 2 * keras_hvd.rank()), mode="repeat", steps=7
    ),
    "from_files": lambda lines: keras_hvd.data.from_files(lines, "text"),
    "even of from_files": lambda lines: keras_hvd.data.even(
        keras_hvd.data.from_files(lines, "text")
    ),
    "ShardedPyDataset": lambda lines: keras_hvd.data.ShardedPyDataset(Numbers()),
}


class Numbers(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full((2, 1), index)


def read(data) -> int:
    if isinstance(data, keras.utils.PyDataset):
        return sum(1 for i in range(data.num_batches) if len(data[i]))
    # Behind the steps of a user's pipeline.
    return sum(1 for _ in data.map(lambda element: element).batch(1).prefetch(1))


@pytest.mark.parametrize("first", ["alone", "together"])
@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_deals_the_parts_of_no_other_job(name, first, lines, rank, size):
    jobs = [[rank], None] if first == "alone" else [None, [rank]]
    join(jobs[0])
    made = f"rank {keras_hvd.rank()} of {keras_hvd.size()}"
    data = DATASETS[name](lines)
    number = read(data)
    assert number > 0
    join(jobs[1])
    with pytest.raises((tf.errors.FailedPreconditionError, RuntimeError)) as raised:
        read(data)
    said = str(raised.value)
    here = f"rank {keras_hvd.rank()} of {keras_hvd.size()}"
    assert f"made by {made}, and is" in said
    assert f" by {here}" in said
    assert "Make it anew after keras_hvd.init()" in said
    assert read(DATASETS[name](lines)) > 0
    join(jobs[0])
    assert read(data) == number


def test_batches_of_another_jobs_seed_are_not_shared(rank, size):
    # The same places, and another first rank that drew the order.
    join([rank])
    data = keras_hvd.data.ShardedPyDataset(Numbers())
    data._seed = 7 + rank
    join(None)
    with pytest.raises(RuntimeError, match="Make it anew"):
        data.on_epoch_end()
    data = keras_hvd.data.ShardedPyDataset(Numbers())
    data._seed = 7 + rank
    with pytest.raises(ValueError, match="seed is 7 on rank 0, and 8 on rank 1"):
        data.on_epoch_end()


def test_a_position_does_not_tell_parts_of_another_job(lines, rank):
    position = keras_hvd.data.Position()
    data = keras_hvd.data.from_files(lines, "text", position=position)
    saved = position.state()
    join([rank])
    with pytest.raises(RuntimeError, match="this Position was made by"):
        position.state()
    with pytest.raises(tf.errors.FailedPreconditionError, match="from_files: this"):
        next(iter(data))
    position = keras_hvd.data.Position()
    position.restore(saved)
    data = keras_hvd.data.from_files(lines, "text", position=position)
    assert len(list(data)) == 12


def test_a_process_set_of_another_job_is_never_taken_for_one_of_this(rank, size):
    first = keras_hvd.add_process_set([0])
    number = first.process_set_id
    step = tf.function(
        lambda: keras_hvd.allreduce(1.0, op=Sum, name="x", process_set=first),
        autograph=False,
    )
    if rank == 0:
        step()
    join(None)
    last = keras_hvd.add_process_set([size - 1])
    assert last.process_set_id > number
    if rank == 0:
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            step()
        assert f"no process set {number}: it belonged to an earlier" in str(
            raised.value
        )
    # The same set has another number, and is traced anew for it.
    keras_hvd.add_process_set(first)
    assert first.process_set_id == last.process_set_id + 1
    if rank == 0:
        with pytest.raises(tf.errors.InvalidArgumentError, match="earlier job"):
            step()
    keras_hvd.barrier()
