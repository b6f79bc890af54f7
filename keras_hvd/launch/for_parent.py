"""`khvdrun` for a program that has started it and waits: it ends when that one dies."""

import sys
from collections.abc import Sequence

from keras_hvd.launch import __main__ as khvdrun
from keras_hvd.launch import processes


def main(arguments: Sequence[str]) -> int:
    """Runs `khvdrun` as long as the process that has started it lives.

    Args:
        arguments: That process' id, then what follows the name of `khvdrun`.

    Returns:
        What to exit with.
    """
    processes.die_with_parent(int(arguments[0]))
    return khvdrun.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
