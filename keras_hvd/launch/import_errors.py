"""Explains why ranks could not import keras_hvd, or Horovod in a script of its time."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence

from keras_hvd.job import installed
from keras_hvd.launch.options import Options

_NO_PACKAGE = "ModuleNotFoundError: No module named 'keras_hvd'"
_NO_HOROVOD = "ModuleNotFoundError: No module named 'horovod'"

# A module named keras_hvd was imported, and lacks what was asked of it.
_LACKS_SOMETHING = re.compile(
    r"(?:AttributeError|ImportError|ModuleNotFoundError): .{,200}'keras_hvd['.]"
)

_IS_PYTHON = re.compile(r"python[\d.]{,9}")


def explain(last_words: Iterable[str], options: Options) -> list[str]:
    """A line that explains the last lines of ranks; none if there is nothing to add.

    Example:

    >>> last_words = ["ModuleNotFoundError: No module named 'keras_hvd'"]
    >>> explain(last_words, Options(command=("python9", "train.py")))
    ["'python9' has no keras_hvd. khvdrun's own Python has: write ... instead"]
    """
    for line in last_words:
        if _NO_PACKAGE in line:
            return [_no_package(options)]
        if _NO_HOROVOD in line:
            return [
                "the script, or a library of it, imports Horovod, which is not "
                "installed: in a script for Keras, write import keras_hvd as hvd "
                "(docs/migrating.md)"
            ]
        if _LACKS_SOMETHING.search(line):
            return _hidden(options.command)
    return []


def _no_package(options: Options) -> str:
    program, path = options.command[0], options.executable
    if _names(path or program) == _names(sys.executable):
        return (
            f"keras_hvd is not installed for {program!r}: khvdrun has found it in "
            f"{str(installed.PACKAGE.parent)!r}. Install it: "
            f"{installed.install_command()}"
        )
    if not _IS_PYTHON.fullmatch(os.path.basename(program)):
        return (
            f"the Python that {program!r} runs has no keras_hvd. khvdrun's own has: "
            f"{sys.executable}"
        )
    found = f" ({path})" if path not in ("", program) else ""
    return (
        f"{program!r}{found} has no keras_hvd. khvdrun's own Python has: write "
        f"{sys.executable} instead"
    )


def _names(python: str) -> tuple[str, str]:
    """What all names of one Python have in common: its folder, and its file.

    Those of several virtual environments are links to the same file.
    """
    return os.path.realpath(os.path.dirname(python)), os.path.realpath(python)


def _hidden(command: Sequence[str]) -> list[str]:
    """Names the file or folder that Python has imported as keras_hvd."""
    # Python looks beside the script first, or here if there is none (python -m).
    script = next((word for word in command if word.endswith(".py")), "")
    package = os.path.join(os.path.dirname(script), "keras_hvd")
    # In Python's order.
    places = (os.path.join(package, "__init__.py"), f"{package}.py", package)
    found = next(filter(os.path.exists, places), None)
    own = os.path.join(installed.PACKAGE, "__init__.py")
    if found is None or os.path.realpath(found) == own:
        return []
    return [
        f"{found!r} hides the package keras_hvd, since Python finds it first: give it "
        "another name"
    ]
