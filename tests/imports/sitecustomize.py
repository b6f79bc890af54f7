"""Halves the time of importing TensorFlow or Keras.

Keras imports scikit-learn and matplotlib wherever they are installed. Here that waits
for their first use. Of pandas it takes two types, which no test gives it: it finds
none, unless the script has imported it before. And Python looks for garbage, of which
an import makes none, at everything that has been imported so far, again and again, and
once more when it ends. `make test` starts hundreds of processes. Python runs this file
when it starts, since the Makefile puts its folder into PYTHONPATH.
"""

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import LazyLoader
from types import ModuleType

_PARTS = ("wrappers", "visualization")
_LATER = {
    f"{package}.{part}"
    for package in ("keras", "keras.src", "keras._tf_keras.keras")
    for part in _PARTS
}
_LARGE = {"keras", "tensorflow"}
_MISSING = "pandas"


class _Large(SourceFileLoader):
    """Runs a module and all that it imports without a look for garbage."""

    running = 0

    def exec_module(self, module: ModuleType) -> None:
        # Not within another one: TensorFlow imports Keras, and Keras TensorFlow.
        was_enabled = gc.isenabled()
        gc.disable()
        _Large.running += 1
        try:
            super().exec_module(module)
        finally:
            _Large.running -= 1
            if was_enabled:
                gc.freeze()
                gc.enable()


class _Finder:
    """Finds these modules as Python does, and loads them in these ways."""

    @staticmethod
    def find_spec(name, path=None, target=None) -> ModuleSpec | None:
        if name == _MISSING and _Large.running:
            raise ModuleNotFoundError(f"left out: {name}", name=name)
        if name not in _LATER | _LARGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return spec
        if name in _LARGE:
            spec.loader = _Large(name, spec.loader.path)
        else:
            spec.loader = LazyLoader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder)
