"""The khvdrun of a host that joins, where it can start nothing."""

import errno
import os
from types import SimpleNamespace

from keras_hvd.launch import joined_job
from keras_hvd.launch.options import Options


def test_a_fork_that_fails_is_said_and_the_host_stays(monkeypatch):
    """The first host waits for the rank, but not for ever."""

    def fail(*arguments):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(joined_job.rank, "spawn", fail)
    said = []
    # It has nothing by which it could end.
    job = SimpleNamespace(_options=Options(check_build=False), _say=said.append)
    joined_job.JoinedJob._reach(job, "127.0.0.1:1", "a name", "true")
    assert said == [
        "error: a rank cannot be started: [Errno 11] Resource temporarily unavailable"
    ]
