"""XLA compiles a step once, for all values of its tensors."""

import re
import sys
from collections import Counter
from pathlib import Path

RANK = Path(__file__).parent / "ranks" / "compiling.py"
# A program as XLA gets it; there are several files of each.
PROGRAM = re.compile(r"step_of_([a-z_]+)_\d+__.*\.before_optimizations\.txt")


def test_each_step_is_compiled_once(khvdrun, tmp_path):
    ended = khvdrun.run("-np", 2, sys.executable, RANK, tmp_path, timeout=120)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        names = [path.name for path in (tmp_path / str(rank)).iterdir()]
        programs = [found[1] for name in names if (found := PROGRAM.search(name))]
        assert len(programs) == 7, Counter(programs)
        assert len(set(programs)) == 7
