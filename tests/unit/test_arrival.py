"""Before a rank calls elastic.run's function it has a place to come, and no others."""

import pytest

import keras_hvd
from keras_hvd.job import arrival, later_jobs


@pytest.fixture(autouse=True)
def of_a_job_that_may_grow(monkeypatch):
    keras_hvd.init()
    for name in "_is_awaited", "_has_arrived", "_is_new":
        monkeypatch.setattr(arrival, name, False)
    monkeypatch.setattr(arrival, "_to_come", None)


def test_a_new_rank_has_the_place_to_come_until_it_arrives():
    arrival.await_arrival(arrival.Place(3, 4, local_rank=1))
    place = keras_hvd.rank(), keras_hvd.size(), keras_hvd.local_rank()
    assert place == (3, 4, 1)
    arrival.arrive()
    assert (keras_hvd.rank(), keras_hvd.size(), keras_hvd.local_rank()) == (0, 1, 0)


def test_a_new_rank_writes_no_timeline_until_it_arrives(tmp_path):
    """Rank 0 of the others writes it."""
    arrival.await_arrival(arrival.Place(3, 4, local_rank=1))
    with arrival.alone():
        keras_hvd.start_timeline(tmp_path / "timeline.json")
    keras_hvd.stop_timeline()
    assert not (tmp_path / "timeline.json").exists()
    arrival.arrive()
    keras_hvd.start_timeline(tmp_path / "timeline.json")
    keras_hvd.stop_timeline()
    assert (tmp_path / "timeline.json").exists()


def test_others_are_refused_until_then_but_within_a_step():
    arrival.await_arrival(None)
    with pytest.raises(keras_hvd.NotInitializedError, match=r"barrier\(\) comes befor"):
        arrival.require_arrived("barrier")
    with arrival.within_step():
        arrival.require_arrived("allreduce")
    with pytest.raises(keras_hvd.NotInitializedError):
        arrival.require_arrived("allreduce")
    arrival.arrive()
    arrival.require_arrived("barrier")


def test_a_second_init_after_it_waits_for_nothing():
    arrival.arrive()
    arrival.await_arrival(arrival.Place(3, 4, local_rank=1))
    arrival.require_arrived("barrier")
    assert keras_hvd.size() == 1


def test_a_rehearsal_is_alone():
    arrival.await_arrival(arrival.Place(3, 4, local_rank=1))
    with arrival.alone():
        assert (keras_hvd.rank(), keras_hvd.size()) == (0, 1)
        assert keras_hvd.allgather_object("here") == ["here"]
    assert (keras_hvd.rank(), keras_hvd.size()) == (3, 4)


def test_a_trace_that_holds_a_place_to_come_is_never_kept():
    arrival.await_arrival(arrival.Place(3, 4, local_rank=0))
    held = set()
    with later_jobs.noting(held):
        keras_hvd.local_rank()
    assert held == {"a place to come"}
