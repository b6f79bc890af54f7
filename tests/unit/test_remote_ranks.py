"""What starts ranks for the khvdrun of another host, and what it says there."""

import errno
import os
import subprocess
import sys
import time
from types import SimpleNamespace

from keras_hvd.launch import remote_ranks
from keras_hvd.launch.pipes import Pipes
from keras_hvd.launch.remote_ranks import RemoteRanks
from keras_hvd.launch.talk import Talk
from keras_hvd.world.rendezvous import address, listener
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.gathering import Group
from keras_hvd.world.rendezvous.proof import Purpose


def test_it_ends_in_silence_if_khvdrun_has_gone_before_it_began():
    """As when its host is not listed any more."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "keras_hvd.launch.remote_ranks"],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_words_to_a_khvdrun_that_has_gone_are_no_error():
    """Everything ends then, and a traceback would be the last line of the host."""
    (reading, theirs), (there, writing) = os.pipe(), os.pipe()
    os.close(there)
    loop = EventLoop()
    talk = Talk(loop, Pipes(reading, writing))
    talk.say(said=1, message={"word": "here"})
    loop.poll()
    assert not talk.is_silent
    talk.close()
    loop.close()
    os.close(theirs)


class Output:
    """Keeps what is said of a rank."""

    def __init__(self):
        self.said = b""

    def feed(self, data):
        self.said += data


def test_a_fork_that_fails_is_said_and_the_host_stays():
    """The first host hears of the end at once."""

    def fail(*arguments):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    ends, output = [], Output()
    # It has nothing by which it could end.
    job = SimpleNamespace(_asked={}, _states={}, _ends={}, _outputs={(1, 1, 2): output})
    job._start_rank, job._tell_of_end = fail, lambda *end: ends.append(end)
    job._on_no_start = lambda *given: RemoteRanks._on_no_start(job, *given)
    asked = {"count": 1, "host": "node1@b", "command": ["true"], "directory": "/tmp"}
    RemoteRanks._start_as_asked(job, 1, asked)
    why = "node1@b cannot execute 'true' in '/tmp': Resource temporarily unavailable"
    assert output.said.decode() == f"khvdrun: {why}\n"
    assert ends == [(1, 0, why, 127 << 8)]


def test_a_host_that_joins_waits_for_the_first_one_as_long_as_it_was_told():
    (free,) = listener.listen_at_free_ports(["127.0.0.1"])
    place = address.Address("127.0.0.1", free.getsockname()[1])
    free.close()
    group = Group("node", Purpose.HOSTS, 1, 2, [place], b"", 0.5)
    told, since = [], time.monotonic()
    first_host = remote_ranks._FirstHost(group, dict, told.append)
    while not told:
        first_host.loop.poll()
        assert time.monotonic() - since < 20
    first_host.close()
    assert f"could not reach node 0 at {place} within 0.5 s: " in told[0]["gone"]
