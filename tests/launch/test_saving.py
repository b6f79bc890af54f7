"""Nothing is saved that may be of a step that was aborted, in a later job neither."""

import json
import signal
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).parent / "ranks" / "saving.py"

WAYS = [
    *("save", "save_h5", "save_weights", "save_model"),
    *("export", "write", "checkpoint", "manager"),
]


@pytest.mark.parametrize(("ranks", "way"), [(3, "optimizer"), (2, "strategy")])
def test_a_rank_that_dies_in_mid_epoch_ends_all_saving(khvdrun, tmp_path, ranks, way):
    command = (sys.executable, RANK, tmp_path, way, "between")
    ended = khvdrun.run("-np", ranks, "--term-after", 60, *command, timeout=120)
    assert ended.returncode == 128 + signal.SIGKILL, ended.stderr
    for rank in range(ranks):
        if rank == 1:
            continue
        note = json.loads((tmp_path / f"{rank}.json").read_text())
        assert note["fit"] == "RankFailedError", note
        # Rank 0 alone saves: its callback is refused, before the ranks' next meeting.
        if rank == 0:
            assert "nothing is saved any more" in note["text"]
            assert note["saved"] == 1
        assert "rank 1 (pid " in note["text"]
        assert note["refused"] == note["refused after shutdown"] == WAYS
        assert not note["changed"]
        # The survivors have joined a job of their own.
        assert note["refused in the next job"] == WAYS
        assert note["refused after another step"] == WAYS
        assert note["refused of a new model"] == []
        assert note["refused of what was sent"] == WAYS
        assert note["refused of what was loaded"] == []
        if rank == 2:
            assert note["still refused"] == WAYS
            assert note["refused when allowed"] == []
