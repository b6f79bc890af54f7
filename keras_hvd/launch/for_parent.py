"""Runs `khvdrun` for another program, and ends it when that program dies."""

import sys
from collections.abc import Sequence

from keras_hvd.launch import __main__ as khvdrun
from keras_hvd.launch import processes


def main(arguments: Sequence[str]) -> int:
    """Runs `khvdrun`; the first argument is the id of this process' parent."""
    processes.die_with_parent(int(arguments[0]))
    return khvdrun.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
