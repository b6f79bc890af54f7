"""`init` after `shutdown`, however often: nothing of the jobs before is left."""

import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "ranks" / "rejoin.py"


@pytest.mark.timeout(600)
def test_many_jobs_take_no_more_than_one(khvdrun, is_soak):
    jobs = 1000 if is_soak else 100
    ended = khvdrun.run("-np", 2, sys.executable, SCRIPT, jobs, timeout=500)
    assert ended.returncode == 0, ended.stderr
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("[0] [{")]
    first, last = json.loads(line.removeprefix("[0] "))
    assert last["descriptors"] <= first["descriptors"]
    # TensorFlow starts threads of its own when it wants them.
    assert last["threads"] <= first["threads"] + 2
    assert last["mappings"] <= first["mappings"] + 20
    # A job's shared memory would be 10 MiB.
    assert last["memory"] <= first["memory"] + 2048
