"""The khvdrun of a host that joins, where it can start nothing."""

import errno
import os

from keras_hvd.launch import joining
from keras_hvd.world.rendezvous.event_loop import EventLoop


def test_a_fork_that_fails_is_said_and_the_host_stays(monkeypatch, capfd):
    """The first host waits for the rank, but not for ever."""

    def fail(*command, **options):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(joining.subprocess, "Popen", fail)
    joined = joining._Joined(EventLoop(), None, 1)
    joined._act({"reach": ["127.0.0.1:1", "a name", "true"]})
    assert not joined._is_over()
    _, err = capfd.readouterr()
    assert err == (
        "khvdrun: error: a rank cannot be started: [Errno 11] Resource temporarily "
        "unavailable\n"
    )
