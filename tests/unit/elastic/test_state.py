"""What a state keeps, and when it says that ranks come or leave."""

import pytest

from keras_hvd import elastic


def test_a_commit_keeps_copies():
    first = [1]
    state = elastic.ObjectState(losses=first, epoch=0)
    first.append(2)
    state.restore()
    assert state.losses == [1]
    state.losses.append(3)
    state.epoch = 5
    state.commit()
    state.losses.append(4)
    state.epoch = 6
    for _ in range(2):
        state.restore()
        assert (state.losses, state.epoch) == ([1, 3], 5)
        # What was given out is not the copy either.
        state.losses.clear()


def test_what_cannot_be_copied_leaves_the_commit_before():
    state = elastic.ObjectState(epoch=1, rows=[])
    state.epoch, state.rows = 2, (row for row in [])
    with pytest.raises(TypeError, match="generator"):
        state.commit()
    state.restore()
    assert (state.epoch, state.rows) == (1, [])


def test_a_value_must_not_hide_a_method():
    with pytest.raises(ValueError, match="ObjectState: commit is a method of it"):
        elastic.ObjectState(commit=1)


def test_a_subclass_says_what_it_keeps():
    for method in ("save", "restore", "commit", "sync"):
        with pytest.raises(NotImplementedError):
            getattr(elastic.State(), method)()


def test_on_a_rank_of_its_own_sync_keeps_what_is_there():
    state = elastic.ObjectState(epoch=0)
    state.epoch = 3
    state.sync()
    state.epoch = 4
    state.restore()
    assert state.epoch == 3


def test_a_reset_is_reset_and_then_the_callbacks():
    class Recorded(elastic.ObjectState):
        def reset(self):
            calls.append("reset")

    calls: list[str] = []
    state = Recorded()
    state.register_reset_callbacks([lambda: calls.append("first")])
    state.register_reset_callbacks([lambda: calls.append("second")])
    state.on_reset()
    assert calls == ["reset", "first", "second"]
