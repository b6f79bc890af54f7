"""The folders of keras_hvd that need no framework are imported where there is none."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "keras", "torch", "jax"):
            raise ModuleNotFoundError(f"{name} is not here", name=name)

sys.meta_path.insert(0, Refused())
import keras_hvd

for room in ("job", "world", "launch", "recording", "report", "timeline"):
    package = importlib.import_module(f"keras_hvd.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    print(room)
print(keras_hvd.Sum)
"""


def test_no_framework_is_needed_but_by_what_is_made_for_it():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
    )
    rooms = ["job", "world", "launch", "recording", "report", "timeline"]
    assert ended.stdout.split() == rooms
    # The collectives are TensorFlow's.
    assert "tensorflow is not here" in ended.stderr.splitlines()[-1]
