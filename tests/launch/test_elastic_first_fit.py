"""A script as for Horovod: its model gets its variables from a first `fit`."""

import json
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "ranks" / "elastic_first_fit.py"


def test_it_goes_on_and_a_rank_that_comes_joins(khvdrun, tmp_path):
    """Reset callbacks make a `fit` too, and rank 0 saves what was restored."""
    options = "-np", 3, "--min-np", 2, "--blacklist-cooldown-range", 0, 0
    ended = khvdrun.run(*options, sys.executable, SCRIPT, tmp_path, timeout=240)
    assert ended.returncode == 0, ended.stderr
    seen = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
    seen = sorted(seen, key=lambda each: each["rank"])
    assert [each["sizes"] for each in seen] == [[3, 2, 3], [3, 2, 3], [3]]
    for each in seen:
        # Also that of the rank whose optimizer was made before it had joined.
        assert each["rates"][-1] == 0.03
        assert each["epoch"] == 6
        assert each["weights"] == seen[0]["weights"]
    assert (tmp_path / "6.keras").exists()
