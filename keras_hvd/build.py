"""`python -m keras_hvd.build`: ops for this Python's TensorFlow, if they are missing.

A wheel has ops for the TensorFlows that it was made for. Bazel makes those for another
one from the sources in the wheel; they lie beside the others.
"""

import argparse
import inspect
import os
import subprocess
import sys
from pathlib import Path

from keras_hvd.exceptions import LibraryError
from keras_hvd.job import native

_PACKAGE = Path(__file__).resolve().parent


def main() -> int:
    """Builds the op library for this Python's TensorFlow. Returns 0 if it opens."""
    argparse.ArgumentParser("python -m keras_hvd.build", usage=__doc__).parse_args()
    try:
        native.engine()
        tensorflow = Path(inspect.getfile(native.tensorflow())).parent.parent
    except LibraryError as error:
        print(error, file=sys.stderr)
        return 1
    folder = _PACKAGE / "_native"
    if not os.access(folder, os.W_OK):
        print(f"{folder}, where the ops go, is not writable for you", file=sys.stderr)
        return 1
    command = [sys.executable, "-I", *_script(), folder]
    variables = {**os.environ, "KERAS_HVD_TENSORFLOW": str(tensorflow)}
    if subprocess.run(command, env=variables).returncode != 0:
        return 1
    # In a new process, because this one has cached the old build's information.
    opening = (
        "import tensorflow as tf; from keras_hvd.job import native; native.ops(); "
        "print(native.ops_library(tf.__version__), 'is built and opens')"
    )
    return subprocess.run([sys.executable, "-c", opening]).returncode


def _script() -> list[str | Path]:
    checkout = _PACKAGE.parent
    if (checkout / "WORKSPACE").exists():
        return [checkout / "bazel" / "build_libraries.py"]
    source = _PACKAGE / "_native" / "source"
    return [source / "bazel" / "build_libraries.py", "--keep-engine"]


if __name__ == "__main__":
    sys.exit(main())
