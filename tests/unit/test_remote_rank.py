"""What starts a rank on another host, and what it says there."""

import os
import socket
import subprocess
import sys

import pytest

from keras_hvd.launch.frames import Frames
from keras_hvd.launch.remote_rank import RemoteRank


def test_it_ends_in_silence_if_khvdrun_has_gone_before_it_began():
    """As when its host is not listed any more."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "keras_hvd.launch.remote_rank"],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


class OneCaller:
    """Listens for one connection, and ends what listens for a second one."""

    def __init__(self):
        self.words, self.of_rank = socket.socketpair()
        self.setblocking = self.words.setblocking
        self.accept = iter([(self.words, "")]).__next__


def test_words_to_a_khvdrun_that_has_gone_are_no_error():
    """Everything ends then, and a traceback would be the last line of the host."""
    reading, writing = os.pipe()
    os.close(reading)
    callers = OneCaller()
    callers.of_rank.send(b"its words")
    with pytest.raises(StopIteration):
        RemoteRank(Frames(-1, writing, 60.0), {})._pass_on_words(callers)
    os.close(writing)
    assert callers.words.fileno() < 0
