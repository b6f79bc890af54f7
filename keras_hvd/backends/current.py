"""The framework with which this process computes, for code that depends on none.

That is all of keras_hvd except the TensorFlow parts: `strategy`, `data` and `tfx`. Each
framework has a folder here. Its `interface` has the functions that optimizers and
callbacks call, and is imported at the first call. Its `process` and `allocator` are for
processes that may be without the framework.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from keras_hvd.backends.tensorflow import allocator, process

__all__ = ["allocator", "framework", "load", "process"]


def load() -> ModuleType:
    """Imports the framework's `interface`, and so registers its layers with Keras.

    Raises RuntimeError if Keras runs on a framework that has no folder here.

    Example:

    >>> load().allreduce.__name__
    'allreduce'
    """
    import keras

    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            "keras_hvd works with Keras on TensorFlow; here it runs on "
            f"{keras.backend.backend()}. Set the environment variable "
            "KERAS_BACKEND=tensorflow, or the backend in keras.json."
        )
    return importlib.import_module("keras_hvd.backends.tensorflow.interface")


class _Framework:
    """Stands for the framework's `interface`."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(load(), name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    from keras_hvd.backends.tensorflow import interface as framework
else:
    framework = _Framework()
