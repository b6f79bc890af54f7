"""The benchmark of Keras on torch runs."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "contenders" / "torch_steps.py"


def test_each_contender_trains():
    short = ("--rounds", "1", "--steps", "2", "--batch", "8")
    launch = [sys.executable, "-m", "keras_hvd.launch", "-np", "2"]
    ended = subprocess.run(
        [*launch, sys.executable, SCRIPT, *short],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    said = re.findall(r"^\[0\] (\S.*?) +[\d.]+ ms a step, ", ended.stdout, re.M)
    assert len(said) == 4 and said[:2] == ["copies", "keras_hvd"]
