"""The end of a process of mpirun: without MPI_Finalize after a failure."""

import subprocess
import sys

import pytest

# No MPI is needed to see with which code Python ends.
SCRIPT = """
import atexit, sys
from keras_hvd.job import mpi_finalization
atexit.register(print, "Python's end", flush=True)
mpi_finalization.avoid_after_failure("Open MPI")
"""


def end(words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + words], capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("", 0),
        ("sys.exit(0)", 0),
        ("sys.exit()", 0),
        ("sys.exit(7)", 7),
        ("sys.exit(256 + 7)", 7),
        ("sys.exit('why')", 1),
        ("raise ValueError", 1),
    ],
)
def test_a_process_ends_with_the_code_of_its_script(words, code):
    ended = end(words)
    assert ended.returncode == code
    assert ended.stdout == "Python's end\n"
