"""All ranks go on from the state of one, and change jobs at the same commit."""

import socket
import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd import elastic
from keras_hvd.backends.tensorflow.gradients import equal_start
from keras_hvd.elastic import loop, world
from keras_hvd.world import renewal


@pytest.fixture(autouse=True)
def later_tests_compare_weights(monkeypatch) -> None:
    """In the job of this module's tests too."""
    monkeypatch.setattr(equal_start, "_given", (None, set()))


def value(rank: int) -> np.ndarray:
    """What a rank has at first."""
    return np.random.default_rng(rank).standard_normal(5)


@pytest.fixture
def variable(rank) -> tf.Variable:
    return tf.Variable(value(rank))


@pytest.fixture
def state(variable, rank) -> elastic.TensorFlowState:
    return elastic.TensorFlowState([variable], step=10 * rank, losses=[rank])


def everything(state: elastic.TensorFlowState) -> tuple:
    return state.variables[0].numpy().tolist(), state.step, state.losses


def of_rank(rank: int) -> tuple:
    return value(rank).tolist(), 10 * rank, [rank]


def test_at_first_all_begin_as_rank_0(state, rank):
    state.sync()
    assert everything(state) == of_rank(0)
    # And go back there.
    state.variables[0].assign(value(rank))
    state.step += 1
    state.losses.append(rank)
    state.restore()
    assert everything(state) == of_rank(0)


def test_variables_of_all_sizes(rank):
    lengths = 3, 700_000, 0, 5, 600_000, 1  # Two have more than 4 MiB.

    def values(rank: int) -> list[np.ndarray]:
        random = np.random.default_rng(rank)
        return [random.standard_normal(length) for length in lengths]

    state = elastic.TensorFlowState([tf.Variable(each) for each in values(rank)])
    state.sync()
    for variable, of_root in zip(state.variables, values(0), strict=True):
        np.testing.assert_array_equal(variable.numpy(), of_root)


def test_all_go_on_from_the_rank_that_has_committed_most(state, rank, size):
    """As after a death within a commit, which some had finished."""
    last = size - 1
    state.sync()
    state.variables[0].assign(value(rank))
    state.step, state.losses = 10 * rank, [rank]
    # What was not committed does not count.
    state.save()
    if rank == last:
        state.commit()
    state.sync()
    assert everything(state) == of_rank(last)


def test_then_all_have_committed_as_often(state, rank, size):
    """Otherwise what a rank commits later would be lost."""
    state.sync()
    if rank == size - 1:
        state.commit()
        state.commit()
    state.sync()
    state.step = 10 + rank
    if rank == 0:
        state.commit()
    state.sync()
    assert state.step == 10


@pytest.mark.parametrize("commits", [0, 5])
def test_a_rank_that_is_new_gets_what_the_others_have(state, rank, size, commits):
    """Though it is rank 0, and whatever it has committed."""
    state.sync()
    state.variables[0].assign(value(size))
    state.step, state.losses = 10 * size, [size]
    if rank == 0:
        state = elastic.TensorFlowState([tf.Variable(value(7))], step=7, losses=[])
        for _ in range(commits):
            state.commit()
    state.sync()
    assert everything(state) == of_rank(size)


def made(rank: int) -> keras.Model:
    """A model that has trained alone, on data of the rank."""
    keras.utils.set_random_seed(rank)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.Adam(0.1 * (rank + 1))
    optimizer.build(model.trainable_variables)
    for each in (*model.weights, *optimizer.variables):
        each.assign_add(keras.ops.full_like(each, rank + 1))
    model.compile(keras_hvd.DistributedOptimizer(optimizer), "mse")
    return model


def arrays(variables: list) -> list[np.ndarray]:
    return [each.numpy() for each in variables]


def test_a_model_with_all_that_decides_how_it_trains_on(rank, size):
    last = size - 1
    model = made(rank)
    state = elastic.KerasState(model, epoch=rank)
    if rank == last:
        state.commit()
    state.sync()
    expected = made(last)
    of_optimizer = model.optimizer.variables
    np.testing.assert_equal(arrays(model.weights), arrays(expected.weights))
    np.testing.assert_equal(arrays(of_optimizer), arrays(expected.optimizer.variables))
    assert state.epoch == last


def test_ranks_draw_different_numbers(rank, size):
    """Each by the seed of the rank that all go on from, which goes on as it did."""
    last = size - 1
    model = made(rank)
    expected = made(last).layers[1].seed_generator.state.numpy()
    expected[0] += rank - last
    state = elastic.KerasState(model)
    if rank == last:
        state.commit()
    for _ in range(2):
        state.sync()
        seed = model.layers[1].seed_generator.state
        np.testing.assert_equal(seed.numpy(), expected)
        # From now on all go on from rank 0, and draw on.
        seed.assign(seed + 1)
        expected += 1
    state.restore()


@pytest.mark.parametrize("is_scaled", [False, True])
def test_gradients_added_up_so_far_are_those_of_all_that_have_them(
    is_scaled, rank, size
):
    """Each rank has its own, and would else send the root's for itself too."""
    model = made(0)
    inner = keras.optimizers.SGD(gradient_accumulation_steps=4)
    optimizer = keras.optimizers.LossScaleOptimizer(inner) if is_scaled else inner
    state = elastic.KerasState(model, keras_hvd.DistributedOptimizer(optimizer))
    state.sync()
    accumulators = inner._accumulated_gradients
    for each in accumulators:
        each.assign(keras.ops.full_like(each, np.nan if rank == 0 else rank))
    if rank != 0:
        # The first rank has what does not count.
        state.commit()
    state.sync()
    mean = np.mean(range(1, size)) if size > 1 else np.nan
    state.restore()
    for each in accumulators:
        np.testing.assert_allclose(each.numpy(), np.full(each.shape, mean))


def test_nobody_is_asked_in_a_job_that_keeps_its_ranks(state, rank, counters):
    before = counters().tensors
    for _ in range(rank + 1):
        state.commit()
    assert counters().tensors == before
    keras_hvd.barrier()


def test_all_leave_at_the_same_commit_for_those_that_wait(state, rank, monkeypatch):
    """Those of whom rank 0 has heard; the others may have heard sooner or later."""
    told = renewal.Renewal("job", rank, rank, gains=True)
    monkeypatch.setenv(*next(iter(told.variables().items())))
    here, there = map(renewal.Words, socket.socketpair())
    monkeypatch.setattr(world, "_words", here)
    if rank != 0:
        there.say("others")
    state.commit()
    state.check_host_updates()
    if rank == 0:
        there.say("others")
    with pytest.raises(keras_hvd.HostsUpdatedInterrupt, match="wait to join this job"):
        state.commit()
    with pytest.raises(keras_hvd.HostsUpdatedInterrupt):
        state.check_host_updates()
    here.close()
    there.close()


@pytest.mark.parametrize("has_it", [True, False])
def test_what_a_rank_that_joins_later_does_not_get_is_told(has_it, size):
    """It compares its weights with nobody's: the others' steps are traced."""
    model, other = made(0), made(0)
    keras_hvd.shutdown()
    keras_hvd.init()
    elastic.KerasState(model if has_it else other).sync()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(np.ones((4, 3)), np.ones((4, 2)), batch_size=4, verbose=0)
    texts = [str(each.message) for each in caught]
    told = [each for each in texts if "the state of elastic.run does not have" in each]
    assert len(told) == (not has_it and size > 1), texts
    assert all(each.startswith("4 variables are trained that") for each in told)


def test_a_training_goes_on_in_the_next_job(
    state, variable, rank, size, equal_on_all_ranks, monkeypatch
):
    """One dies in step 3, and another one in step 4, which the last rank committed."""
    last = size - 1
    failure = [b""]
    engine = SimpleNamespace(khvd_failure=lambda: failure[0])
    monkeypatch.setattr(loop, "native", SimpleNamespace(engine=lambda: engine))

    def renew():
        failure[0] = b""
        keras_hvd.barrier()

    def fail():
        failure[0] = b"rank 9 was killed by signal 9"
        raise OSError("words of a framework")

    monkeypatch.setattr(world, "renew", renew)
    begins = []

    @elastic.run
    def train(state):
        begins.append((state.step, state.losses.copy()))
        while state.step < 5:
            mean = keras_hvd.allreduce(tf.constant(value(rank + state.step)))
            variable.assign_add(mean)
            state.step += 1
            state.losses.append(rank)
            if state.step == 3 and len(begins) == 1:
                fail()
            if state.step == 4 and len(begins) == 2:
                if rank == last:
                    state.commit()
                fail()
            state.commit()
        return "trained"

    assert train(state) == "trained"
    in_two = [0, 0, 0]
    assert begins == [(0, [0]), (2, in_two), (4, [*in_two, last, last])]
    # Each step counts once.
    steps = [np.mean([value(r + s) for r in range(size)], axis=0) for s in range(5)]
    np.testing.assert_allclose(variable, value(0) + np.sum(steps, axis=0))
    assert equal_on_all_ranks([variable.numpy()])


@pytest.mark.parametrize("way", ["initial_epoch", "fewer epochs"])
@pytest.mark.filterwarnings("ignore:.*shuffle=True. was passed")
def test_fit_goes_on_where_it_was(way, rank, size, monkeypatch):
    """With as many steps in all, which end at the same weights."""
    x = np.random.default_rng(rank).standard_normal((4, 3)).astype(np.float32)
    data = tf.data.Dataset.from_tensors((x, x[:, :2])).repeat()
    begins = []

    def fit(state):
        epochs = {"epochs": 3 - state.epoch}
        if way == "initial_epoch":
            epochs = {"initial_epoch": state.epoch, "epochs": 3}
        callbacks = [
            elastic.CommitStateCallback(state, 2),
            elastic.UpdateBatchStateCallback(state),
            elastic.UpdateEpochStateCallback(state),
        ]
        if begins == [(0, 0)]:
            callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=hear))
        state.model.fit(
            data, steps_per_epoch=5, callbacks=callbacks, verbose=0, **epochs
        )

    def hear(batch, logs):
        # Between two commits, of which the last was that of batch 2.
        if batch == 2 and int(states[1].optimizer.iterations) == 5 + 3:
            failure[0] = b"rank 9 was killed by signal 9"
            raise OSError("words of a framework")

    @elastic.run
    def fit_in_jobs(state):
        begins.append((state.epoch, state.batch))
        fit(state)

    failure = [b""]
    engine = SimpleNamespace(khvd_failure=lambda: failure[0])
    monkeypatch.setattr(loop, "native", SimpleNamespace(engine=lambda: engine))

    def renew():
        failure[0] = b""

    monkeypatch.setattr(world, "renew", renew)
    states = [small(), small()]
    fit(states[0])
    fit_in_jobs(states[1])
    assert begins == [(0, 0), (1, 2)]
    for state in states:
        assert (state.epoch, state.batch) == (3, 0)
    np.testing.assert_equal(*(arrays(state.variables) for state in states))


def small() -> elastic.KerasState:
    """The state of a model that begins alike on all ranks."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    return elastic.KerasState(model, epoch=0, batch=0)
