"""Runs `khvdrun` for another program, and ends it when that program dies."""

import pickle

from keras_hvd.launch import __main__ as khvdrun
from keras_hvd.launch import processes


def run(parent: str, options: str) -> int:
    """Runs `khvdrun` for the process `parent`, with options from a file."""
    processes.die_with_parent(int(parent))
    with open(options, "rb") as file:
        return khvdrun.run(pickle.load(file))
