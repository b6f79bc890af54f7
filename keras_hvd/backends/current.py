"""The framework with which this process computes, for code that depends on none.

That is all of keras_hvd except the TensorFlow parts: `strategy`, `data` and `tfx`. Each
framework has a folder here. Its `interface` has the functions that optimizers and
callbacks call, and is imported at the first call. Its `process` is for processes that
may be without the framework.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pathlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from keras_hvd.backends.tensorflow import allocator

__all__ = [
    "allocator",
    "framework",
    "framework_name",
    "load",
    "module_of",
    "of_tensorflow_alone",
    "process",
]

_FRAMEWORKS = ("tensorflow", "torch")

# What only TensorFlow has, by the beginning of its name: what to use elsewhere.
_INSTEAD = {
    "keras_hvd.strategy": "keras_hvd.DistributedOptimizer with fit()",
    "keras_hvd.elastic.keras_fit": "fit() with BackupAndRestore, and start a job again",
    "keras_hvd.elastic.tensorflow_state": (
        "keras_hvd.elastic.ObjectState, or BackupAndRestore, and start a job again"
    ),
    "keras_hvd.backends.tensorflow.gradients.tape": "keras_hvd.DistributedOptimizer",
    "keras_hvd.backends.tensorflow.global_variables": (
        "keras_hvd.broadcast_variables(model.variables, root_rank), or the callback "
        "keras_hvd.callbacks.BroadcastGlobalVariables"
    ),
    "keras_hvd.backends.tensorflow.rank_ops": (
        "the functions of the same names without _op, such as keras_hvd.rank()"
    ),
    "keras_hvd.backends.tensorflow": (
        "keras_hvd.allreduce, keras_hvd.allgather or keras_hvd.broadcast"
    ),
}


def framework_name() -> str:
    """The framework that Keras runs on, or would if it were imported now.

    >>> import keras
    >>> framework_name() == keras.backend.backend()
    True
    """
    keras: Any = sys.modules.get("keras")
    if hasattr(keras, "backend"):
        return keras.backend.backend()
    chosen = os.environ.get("KERAS_BACKEND")
    return chosen or _configured() or "tensorflow"


def load() -> ModuleType:
    """Imports the framework's `interface`, and registers keras_hvd's layer with Keras.

    Raises RuntimeError if Keras runs on a framework that has no folder here.

    Example:

    >>> callable(load().allreduce)
    True
    """
    framework = framework_name()
    if framework not in _FRAMEWORKS:
        raise RuntimeError(
            "keras_hvd works with Keras on TensorFlow and on torch; here it runs on "
            f"{framework}. Set the environment variable KERAS_BACKEND=tensorflow or "
            "=torch, or the backend in keras.json."
        )
    interface = _part("interface", framework)
    importlib.import_module("keras_hvd.backends.sync_batch_normalization")
    return interface


def module_of(name: str, module: str) -> ModuleType:
    """Imports the module that has a public name of keras_hvd for this framework.

    `module` has it for TensorFlow. Raises ImportError if that needs TensorFlow, Keras
    runs on another framework, and that has no such name.

    Example:

    >>> module_of("callbacks", "keras_hvd.callbacks").__name__
    'keras_hvd.callbacks'
    """
    instead = next((_INSTEAD[each] for each in _INSTEAD if _is_in(module, each)), "")
    framework = framework_name() if instead else "tensorflow"
    if framework == "tensorflow":
        return importlib.import_module(module)
    own = module.replace(".backends.tensorflow.", f".backends.{framework}.")
    if own != module and framework in _FRAMEWORKS and importlib.util.find_spec(own):
        found = importlib.import_module(own)
        if hasattr(found, name):
            return found
    raise of_tensorflow_alone(name, instead)


def of_tensorflow_alone(name: str, instead: str) -> ImportError:
    """The error for a public name that this framework lacks, and what to use instead.

    >>> print(of_tensorflow_alone("Strategy", "keras_hvd.DistributedOptimizer"))
    keras_hvd.Strategy works with Keras on TensorFlow alone, and here Keras runs on ...
    """
    return ImportError(
        f"keras_hvd.{name} works with Keras on TensorFlow alone, and here Keras runs "
        f"on {framework_name()}. Use {instead}"
    )


class _Framework:
    """Stands for the framework's `interface`."""

    def __getattr__(self, part: str) -> Any:
        interface = load()
        if not hasattr(interface, part):
            raise AttributeError(
                f"this works with Keras on TensorFlow alone, and here Keras runs on "
                f"{framework_name()}, for which keras_hvd has no {part}"
            )
        found = getattr(interface, part)
        setattr(self, part, found)
        return found


class _Process:
    """Stands for the framework's `process`.

    It may change after `init`: a script may choose Keras' backend later. Where it has
    no folder, what is TensorFlow's does nothing.
    """

    def __getattr__(self, part: str) -> Any:
        framework = framework_name()
        known = framework if framework in _FRAMEWORKS else "tensorflow"
        return getattr(_part("process", known), part)


if TYPE_CHECKING:
    from keras_hvd.backends.tensorflow import interface as framework
    from keras_hvd.backends.tensorflow import process
else:
    framework = _Framework()
    process = _Process()


def _part(part: str, framework: str) -> ModuleType:
    return importlib.import_module(f"keras_hvd.backends.{framework}.{part}")


def _configured() -> str | None:
    """The backend in the configuration file, which Keras makes if there is none."""
    folder = os.environ.get("KERAS_HOME") or pathlib.Path.home() / ".keras"
    try:
        return json.loads(pathlib.Path(folder, "keras.json").read_text())["backend"]
    except (OSError, ValueError, KeyError):
        return None


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
