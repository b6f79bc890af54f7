"""A training goes on in the next job after a failure or a change, and only then."""

import pytest

import keras_hvd
from keras_hvd import elastic
from keras_hvd.elastic import world
from keras_hvd.exceptions import RankFailedError


class Recorded(elastic.ObjectState):
    """A state that notes what is done with it."""

    def __init__(self, **kwargs):
        self.calls = []
        super().__init__(**kwargs)

    def restore(self):
        self.calls.append("restore")
        super().restore()

    def sync(self):
        self.calls.append("sync")
        super().sync()

    def reset(self):
        self.calls.append("reset")


@pytest.fixture
def state():
    return Recorded(step=0)


def test_a_training_that_succeeds_is_called_once(state, job):
    @elastic.run
    def train(state, first, *, second):
        """Trains."""
        state.calls.append("train")
        return first + second

    assert train(state, 1, second=2) == 3
    assert state.calls == ["sync", "train"]
    assert (train.__name__, train.__doc__) == ("train", "Trains.")
    assert job.renewals == 0


@pytest.mark.parametrize("error", [OSError("in a callback"), RuntimeError("in fit")])
def test_after_a_failure_it_goes_on_from_the_commit(state, job, error):
    """Whatever it raised: the engine knows."""

    @elastic.run
    def train(state):
        state.calls.append(state.step)
        if job.renewals == 2:
            return "trained"
        state.step += 1
        state.commit()
        state.step += 100
        job.fail(error)

    assert train(state) == "trained"
    again = ["restore", "reset", "sync"]
    assert state.calls == ["sync", 0, *again, 1, *again, 2]


def test_when_others_come_it_goes_on_from_what_it_has(state, job):
    """Committed or not."""

    @elastic.run
    def train(state):
        state.calls.append(state.step)
        if job.renewals == 2:
            return "trained"
        state.step += 1
        raise keras_hvd.HostsUpdatedInterrupt("others wait")

    assert train(state) == "trained"
    again = ["reset", "sync"]
    assert state.calls == ["sync", 0, *again, 1, *again, 2]


def test_a_rank_that_is_new_joins_first(state, job, monkeypatch):
    """With a state that does not count, it has nothing to restore."""
    monkeypatch.setattr(world, "is_new", lambda: job.renewals == 0)
    elastic.run(lambda state: state.calls.append("train"))(state)
    assert (state.calls, job.renewals) == (["reset", "sync", "train"], 1)


def test_an_exception_of_the_training_itself_is_raised(state, job):
    @elastic.run
    def train(state):
        state.step = 1
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        train(state)
    assert (state.calls, state.step, job.renewals) == (["sync"], 1, 0)


def test_an_interrupt_of_the_user_ends_it(state, job):
    @elastic.run
    def train(state):
        job.fail(KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt):
        train(state)
    assert job.renewals == 0


def test_a_failure_in_sync(state, job, monkeypatch):
    """The first of them is in no later job."""
    plain = elastic.ObjectState.sync

    def sync(state):
        if job.renewals < 2:
            state.step = 5
            job.fail()
        plain(state)

    monkeypatch.setattr(elastic.ObjectState, "sync", sync)
    elastic.run(lambda state: state.calls.append(state.step))(state)
    again = ["restore", "reset", "sync"]
    assert state.calls == ["sync", *again, *again, 0]


def test_a_failure_in_a_reset_callback(state, job):
    def callback():
        state.calls.append("callback")
        if job.renewals < 3:
            job.fail()

    @elastic.run
    def train(state):
        state.calls.append("train")
        if job.renewals == 0:
            job.fail()

    state.register_reset_callbacks([callback])
    train(state)
    again = ["restore", "reset", "callback"]
    assert state.calls == ["sync", "train", *again * 3, "sync", "train"]


def test_an_exception_of_a_reset_callback_is_raised(state, job):
    def callback():
        raise ValueError("the user's own")

    state.register_reset_callbacks([callback])
    with pytest.raises(ValueError, match="the user's own"):
        elastic.run(lambda state: job.fail())(state)


def test_a_job_that_cannot_go_on(state, job, monkeypatch):
    """The error tells the failure too, and the state is whole."""

    def renew():
        raise RankFailedError("this job keeps its ranks")

    @elastic.run
    def train(state):
        state.step = 5
        job.fail(OSError("the first"))

    monkeypatch.setattr(world, "renew", renew)
    with pytest.raises(RankFailedError, match="keeps its ranks") as raised:
        train(state)
    assert str(raised.value.__context__) == "the first"
    assert state.step == 0


def test_it_takes_a_state(job):
    with pytest.raises(TypeError, match=r"takes a keras_hvd.elastic.State.*got 3"):
        elastic.run(print)(3)
