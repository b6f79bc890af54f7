"""Keras has its parts for scikit-learn and matplotlib once somebody asks for them.

It imports both wherever they are installed, which is a third of the time that a process
needs until it has TensorFlow, and `make test` starts hundreds. Python runs this file
when it starts, since the Makefile puts its folder into PYTHONPATH.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader

_PARTS = ("wrappers", "visualization")
_LATER = {
    f"{package}.{part}"
    for package in ("keras", "keras.src", "keras._tf_keras.keras")
    for part in _PARTS
}


class _Later:
    """Finds these modules as Python does, and has them run at their first use."""

    @staticmethod
    def find_spec(name, path=None, target=None) -> ModuleSpec | None:
        if name not in _LATER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


sys.meta_path.insert(0, _Later)
