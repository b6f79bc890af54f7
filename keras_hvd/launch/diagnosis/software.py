"""Whether keras_hvd's libraries, TensorFlow and Keras exist and fit together."""

import sys

from keras_hvd.exceptions import LibraryError
from keras_hvd.job import installed, native
from keras_hvd.launch.diagnosis.findings import Finding, failure, warning


def engine() -> Finding:
    """Opens the engine's library."""
    try:
        version = native.engine().khvd_version().decode()
    except LibraryError as error:
        return failure("engine", "cannot be used", str(error))
    return Finding("engine", f"version {version}, opens")


def tensorflow() -> Finding:
    """Checks that TensorFlow's version has an op library."""
    name = "TensorFlow"
    try:
        installed.require_one_version("tensorflow")
    except installed.Overwritten as overwritten:
        return failure(name, "two at once", str(overwritten))
    except installed.Missing as missing:
        advice = f"{sys.executable} -m pip install tensorflow"
        return failure(name, str(missing), advice)
    found = installed.versions("tensorflow")
    if not found:
        advice = "khvdrun --check-build imports it to find out"
        return warning(name, installed.describe("tensorflow"), advice)
    # All packages that provide the module have the same version.
    version = next(iter(found.values()))
    figure = installed.describe("tensorflow")
    try:
        native.ops_library(version)
    except LibraryError as error:
        return failure(name, f"{figure}: no ops for it", str(error))
    built_for = native.ops_info(version)["tensorflow"]
    return Finding(name, f"{figure}; the ops are built for {built_for}")


def keras() -> Finding:
    """Looks for Keras.

    Example:

    >>> keras().name
    'Keras'
    """
    try:
        return Finding("Keras", installed.describe("keras"))
    except installed.Missing as missing:
        advice = f"{sys.executable} -m pip install 'keras>=3.12'"
        return failure("Keras", str(missing), advice)
