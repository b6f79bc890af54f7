"""What starts a rank on another host, and what it says there."""

import os
import subprocess
import sys


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
