"""tensorflow-io, if it loads."""

from __future__ import annotations

import importlib.util
import types

import tensorflow as tf

from keras_hvd.job import installed

VERSIONS = "tensorflow-io 0.37.1, which loads on TensorFlow 2.16 only"


def why_not() -> str:
    """Returns why tensorflow-io cannot be used; "" if it can.

    Example:

    >>> bool(why_not()) or bool(load())
    True
    """
    if not tf.__version__.startswith("2.16."):
        return f"this is TensorFlow {tf.__version__}"
    if importlib.util.find_spec("tensorflow_io") is None:
        return f"tensorflow-io is not installed: {installed.install_command('io')}"
    try:
        load()
    except Exception as error:  # its libraries may raise anything
        return f"it does not load: {error}"
    return ""


def load() -> types.ModuleType:
    """Imports tensorflow-io with its ops. May raise anything."""
    import tensorflow_io
    from tensorflow_io.python.ops import core_ops

    # The first use of one of its ops opens its library.
    core_ops.io_parquet_readable_info  # noqa: B018
    return tensorflow_io
