"""What the callbacks keep of a fit that is cut short, and of those that go on."""

import itertools

import keras
import numpy as np
import pytest

import keras_hvd
from keras_hvd import elastic
from keras_hvd.elastic import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)

# Data that are shorter than they should be.
pytestmark = pytest.mark.filterwarnings("error:Your input ran out of data")

STEPS, EPOCHS = 5, 4
X = np.ones((STEPS, 3), np.float32)


@pytest.fixture
def model():
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    return made


@pytest.fixture
def state(model):
    return elastic.KerasState(model, epoch=0, batch=0)


class Fail(keras.callbacks.Callback):
    """Makes the job fail once, at the end of a batch or of an epoch, by `fit`'s count.

    It counts the steps of each epoch, too.
    """

    def __init__(self, job, epoch: int, batch: int | None = None):
        super().__init__()
        self.job, self.place = job, (epoch, batch)
        self.steps: list[int] = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.steps.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.steps[-1] += 1
        self._fail_at(self.epoch, batch)

    def on_epoch_end(self, epoch, logs=None):
        self._fail_at(epoch, None)

    def _fail_at(self, *place):
        if place == self.place and not self.job.renewals:
            self.job.fail()


def updates(state):
    return [
        CommitStateCallback(state),
        UpdateBatchStateCallback(state),
        UpdateEpochStateCallback(state),
    ]


WAYS = {
    "initial_epoch": lambda epoch: {"initial_epoch": epoch, "epochs": EPOCHS},
    "fewer epochs": lambda epoch: {"epochs": EPOCHS - epoch},
}


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [None, 0, 3])
def test_epochs_and_batches_are_those_of_the_training(
    model, state, job, order, way, batch
):
    """However the script tells `fit` how many epochs are left, and in all orders."""
    fail = Fail(job, epoch=1, batch=batch)
    begins = []

    @elastic.run
    def train(state):
        begins.append((state.epoch, state.batch, int(model.optimizer.iterations)))
        callbacks = updates(state)
        callbacks = [*(callbacks[place] for place in order), fail]
        model.fit(
            *(X, X[:, :1], 1),
            steps_per_epoch=STEPS,
            **WAYS[way](state.epoch),
            callbacks=callbacks,
            verbose=0,
        )

    train(state)
    epoch, done = (2, 0) if batch is None else (1, batch + 1)
    assert begins == [(0, 0, 0), (epoch, done, epoch * STEPS + done)]
    assert (state.epoch, state.batch) == (EPOCHS, 0)
    # The epoch that was cut short has as many steps as the others.
    assert int(model.optimizer.iterations) == EPOCHS * STEPS
    cut_short = [STEPS] if batch is None else [done, STEPS - done]
    rest = [STEPS] * (EPOCHS - 2)
    assert fail.steps == [STEPS, *cut_short, *rest]


def test_failures_in_each_part_of_an_epoch(model, state, job):
    begins = []

    class FailAgain(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and job.renewals < 2:
                job.fail()

    @elastic.run
    def train(state):
        begins.append((state.epoch, state.batch))
        model.fit(
            *(X, X[:, :1], 1),
            steps_per_epoch=STEPS,
            epochs=2 - state.epoch,
            callbacks=[*updates(state), FailAgain()],
            verbose=0,
        )

    train(state)
    assert begins == [(0, 0), (0, 2), (0, 4)]
    assert int(model.optimizer.iterations) == 2 * STEPS


def test_an_epoch_of_which_no_step_is_left_has_one(model, state):
    """As when the number of ranks, and so that of steps, has changed."""
    state.batch = STEPS + 1
    model.fit(
        *(X, X[:, :1], 1),
        steps_per_epoch=STEPS,
        epochs=2,
        callbacks=updates(state),
        verbose=0,
    )
    assert int(model.optimizer.iterations) == 1 + STEPS


def test_without_steps_per_epoch_the_data_are_the_scripts(model, state):
    state.batch = 2
    model.fit(*(X[2:], X[2:, :1], 1), epochs=2, callbacks=updates(state)[1:], verbose=0)
    assert int(model.optimizer.iterations) == 2 * (STEPS - 2)


class Committed(elastic.ObjectState):
    def __init__(self):
        self.commits = []
        super().__init__(epoch=0, batch=0)

    def commit(self):
        self.commits.append((self.epoch, self.batch))
        super().commit()


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_commit_after_so_many_batches_and_each_epoch(model, steps_per_execution):
    model.compile(model.optimizer, "mse", steps_per_execution=steps_per_execution)
    state = Committed()
    callbacks = [CommitStateCallback(state, 2), *updates(state)[1:]]
    model.fit(*(X, X[:, :1], 1), epochs=2, callbacks=callbacks, verbose=0)
    commits = [2, 4] if steps_per_execution == 1 else [2, 4, 6]
    of_epoch = [[*((e, batch) for batch in commits), (e + 1, 0)] for e in (0, 1)]
    assert state.commits == [*of_epoch[0], *of_epoch[1]]


def test_validation_changes_nothing(model, state):
    model.fit(
        *(X, X[:, :1], 1),
        validation_data=(X, X[:, :1]),
        validation_batch_size=1,
        callbacks=updates(state),
        verbose=0,
    )
    assert (state.epoch, state.batch) == (1, 0)


def test_a_training_in_parts(model, state):
    """A script may also call `fit` once for each epoch."""
    while state.epoch < 3:
        model.fit(*(X, X[:, :1]), callbacks=updates(state), verbose=0)
        state.restore()
    assert state.epoch == 3


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: UpdateEpochStateCallback(elastic.ObjectState(batch=0)), ValueError,
         "UpdateEpochStateCallback: the state has no epoch: make it with epoch=0"),
        (lambda: UpdateBatchStateCallback(elastic.ObjectState(epoch=0)), ValueError,
         "UpdateBatchStateCallback: the state has no batch: make it with batch=0"),
        (lambda: CommitStateCallback(elastic.ObjectState(), 0), ValueError,
         "batches_per_commit=0 must be at least 1"),
        (lambda: CommitStateCallback(elastic.ObjectState(), 1.5), TypeError,
         "batches_per_commit must be a whole number; got 1.5"),
        (lambda: CommitStateCallback("state"), TypeError,
         "CommitStateCallback takes a keras_hvd.elastic.State.*got 'state'"),
        (lambda: UpdateEpochStateCallback("state"), TypeError,
         "UpdateEpochStateCallback takes a keras_hvd.elastic.State.*got 'state'"),
    ],
)  # fmt: skip
def test_what_they_do_not_take(make, error, message):
    with pytest.raises(error, match=message):
        make()
