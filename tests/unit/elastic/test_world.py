"""A rank takes the place that khvdrun has told last."""

import socket

from keras_hvd.elastic import world
from keras_hvd.world import initialization, renewal
from keras_hvd.world.renewal import Renewal, Words


def test_a_place_that_is_called_off_already_is_not_taken(monkeypatch):
    """Both have come before the rank has looked, and only one of them is to be read."""
    here, there = map(Words, socket.socketpair())
    taken = []

    def rejoin(cancel):
        there.say("go")

    monkeypatch.setattr(initialization, "rejoin", rejoin)
    monkeypatch.setattr(renewal, "of", lambda variables: Renewal("khvdrun-7", 2, 0))
    monkeypatch.setattr(renewal, "take_place", lambda told, *what: taken.append(what))
    for job in "first", "second":
        there.say("join", job=job, variables={"KERAS_HVD_JOB": job}, generation=2)
    world._join_next(here)
    assert taken == [({"KERAS_HVD_JOB": "second"}, 2)]
    assert there.hear() == {"word": "joined", "job": "second"}
