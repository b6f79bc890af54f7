"""The folders of keras_hvd that need no framework are imported where there is none."""

import subprocess
import sys

import pytest

# No importer gets a framework, Keras among them.
ANYONE = """
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "keras", "torch", "jax"):
            raise ModuleNotFoundError(f"{name} is not here", name=name)

sys.meta_path.insert(0, Refused())
"""

# Keras cannot be imported without one. So Keras gets it, and keras_hvd does not.
KERAS_HVD = """
import builtins, keras

plain = builtins.__import__

def without_framework(name, globals=None, *others):
    by = (globals or {}).get("__name__", "").partition(".")[0]
    if by == "keras_hvd" and name.partition(".")[0] == "tensorflow":
        raise ModuleNotFoundError(f"{name} is not here", name=name)
    return plain(name, globals, *others)

builtins.__import__ = without_framework
"""

PROGRAM = """
import importlib, pkgutil, sys

MADE_FOR_IT = (".backends.tensorflow.", ".backends.torch.")
{refuse}
import keras_hvd

for room in {rooms}:
    found = importlib.import_module(f"keras_hvd.{{room}}")
    for module in pkgutil.walk_packages(
        getattr(found, "__path__", []), f"keras_hvd.{{room}}."
    ):
        is_made_for_it = any(each in module.name for each in MADE_FOR_IT)
        if not module.name.endswith("__main__") and not is_made_for_it:
            importlib.import_module(module.name)
    print(room)
print(keras_hvd.allreduce)
"""


@pytest.mark.parametrize(
    ("refuse", "rooms"),
    [
        (ANYONE, ["job", "world", "launch", "recording", "report", "timeline"]),
        (KERAS_HVD, ["backends", "optimizer", "callbacks", "keras_tuner"]),
    ],
    ids=["without Keras", "with Keras"],
)
def test_no_framework_is_needed_but_by_what_is_made_for_it(refuse, rooms):
    program = PROGRAM.format(refuse=refuse, rooms=rooms)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert ended.stdout.split() == rooms, ended.stderr
    # The collectives are TensorFlow's.
    assert "tensorflow is not here" in ended.stderr.splitlines()[-1]
