"""Where training stops when a rank sets `stop_training`."""

import threading

import keras
import numpy as np
import pytest

import keras_hvd
from keras_hvd.callbacks import BroadcastGlobalVariables, MetricAverage, stopping

BATCHES = 6
X = np.linspace(-1, 1, 4 * BATCHES * 3, dtype="float32").reshape(-1, 3)

# An attribute that no callback's code names.
HIDDEN = "stop_" + "training"


class Batches(keras.callbacks.Callback):
    """Counts the batches of each epoch, and those that begin with a wish to stop."""

    def __init__(self):
        super().__init__()
        self.made = []
        self.found_set = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.made.append(0)

    def on_train_batch_begin(self, batch, logs=None):
        self.found_set += getattr(self.model, HIDDEN)

    def on_train_batch_end(self, batch, logs=None):
        self.made[-1] += 1


class Hidden(keras.callbacks.Callback):
    """Wants to stop after a batch, in a way that its code does not show."""

    def __init__(self, batch, wants=True):
        super().__init__()
        self.batch, self.wants = batch, wants

    def on_train_batch_end(self, batch, logs=None):
        if self.wants and batch >= self.batch:
            setattr(self.model, HIDDEN, True)


class Visible(Hidden):
    def on_train_batch_end(self, batch, logs=None):
        if self.wants and batch >= self.batch:
            self.model.stop_training = True


@pytest.fixture
def fit(make_linear, rank, equal_on_all_ranks):
    """Trains, checks that ranks are equal, and returns each epoch's batches."""

    def run(*callbacks, epochs=3, steps_per_execution=1):
        model = make_linear(
            keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
            steps_per_execution=steps_per_execution,
        )
        seen = Batches()
        ours = BroadcastGlobalVariables(0)
        y = X[:, :2] * (rank + 1)
        # Agreements of trainings that have failed, in other tests.
        left = {*stopping.AnyRank._under_way}
        model.fit(X, y, 4, epochs=epochs, verbose=0, callbacks=[ours, *callbacks, seen])
        assert seen.found_set == 0
        assert equal_on_all_ranks(model.get_weights())
        assert stopping.AnyRank._under_way == left
        # So do the next collectives of their name.
        model.fit(X, y, 4, verbose=0, callbacks=[ours, seen])
        assert seen.made.pop() == -(-BATCHES // steps_per_execution)
        return seen.made

    return run


def test_after_that_very_batch_where_a_callback_shows_it(fit, rank, size):
    assert fit(Visible(2, rank == size - 1)) == [3]
    assert fit(*[Visible(2)] * (rank == size - 1)) == [3]
    assert fit(Visible(BATCHES - 1, rank == 0)) == [BATCHES]


def test_a_step_later_on_all_ranks_where_none_shows_it(fit, rank, size):
    later = 4 if size > 1 else 3
    assert fit(Hidden(2, rank == size - 1)) == [later]
    assert fit(Hidden(0, rank == 0)) == [later - 2]
    # One of a rank's own counts for all.
    assert fit(*[Hidden(2)] * (rank == size - 1)) == [later]


def test_two_that_want_it_in_different_batches(fit, rank, size):
    first = Hidden(2, rank == 0)
    assert fit(first, Hidden(3, rank == size - 1)) == [4 if size > 1 else 3]


def test_in_the_last_batches_of_an_epoch(fit, rank, size):
    """An agreement that is under way then counts at the epoch's end."""
    assert fit(Hidden(BATCHES - 1, rank == size - 1)) == [BATCHES]
    late = BATCHES if size > 1 else BATCHES - 1
    assert fit(Hidden(BATCHES - 2, rank == size - 1)) == [late]


def test_the_thread_that_trains_ends_the_batches(make_linear, points, monkeypatch):
    """Keras on torch would call from another one, where no callback ends batches."""
    seen = []

    def after_batch(self, model):
        seen.append(threading.current_thread())

    monkeypatch.setattr(stopping.Stopping, "after_batch", after_batch)
    model = make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.fit(*points, 8, callbacks=[MetricAverage()], verbose=0)
    assert seen == [threading.main_thread()] * 3


@pytest.mark.usefixtures("on_tensorflow")
@pytest.mark.parametrize("steps", [2, 4])
def test_by_executions(steps, fit, rank, size):
    """With 4 steps the data ends within the second one, which is not agreed on."""
    stop = Hidden(0, rank == size - 1)
    assert fit(stop, steps_per_execution=steps) == [2 if size > 1 else 1]


def test_nothing_stops_without_a_wish(fit):
    assert fit(Hidden(0, False), epochs=2) == [BATCHES] * 2


def test_no_rank_waits_for_another_at_the_end_of_a_step(several_ranks, rank, fit):
    """Unless a callback shows that it may stop there."""

    class Late(keras.callbacks.Callback):
        """The others end their third step once rank 0 has begun its fourth."""

        def tell(self):
            keras_hvd.broadcast_object("rank 0 goes on", name="late")

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3 and rank == 0:
                self.tell()

        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and rank != 0:
                self.tell()

    assert fit(Late(), epochs=1) == [BATCHES]


def test_the_rank_whose_loss_is_invalid_says_so(make_linear, rank, size, capsys):
    model = make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    y = np.full((len(X), 2), np.nan if rank == size - 1 else 1)
    callbacks = [BroadcastGlobalVariables(0), keras.callbacks.TerminateOnNaN()]
    model.fit(X, y, 4, verbose=0, callbacks=callbacks)
    said = "Batch 0: Invalid loss" in capsys.readouterr().out
    assert keras_hvd.allgather_object(said) == [False] * (size - 1) + [True]


@pytest.mark.parametrize("callback", [Visible, Hidden])
def test_rank_0_says_once_that_another_rank_stops_it(
    callback, fit, rank, size, several_ranks, capsys
):
    """Of a wish of its own its callbacks tell."""
    fit(callback(2, rank == size - 1))
    said = capsys.readouterr().out.count("another rank has set model.stop_training")
    assert said == (rank == 0)
    fit(callback(2, rank == 0), callback(2, rank == size - 1))
    assert "another rank" not in capsys.readouterr().out
