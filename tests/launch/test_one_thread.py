"""With one thread for TensorFlow's ops, others run while collectives wait."""

import sys
from pathlib import Path

RANK = Path(__file__).parent / "ranks" / "one_thread.py"


def test_ops_run_while_collectives_wait(khvdrun, tmp_path):
    stalled = {"KERAS_HVD_STALL_ABORT_SECONDS": "20"}
    ended = khvdrun.run("-np", 2, sys.executable, RANK, tmp_path, env=stalled)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("went on") == 2
