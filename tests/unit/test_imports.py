"""tests/imports: an import has no look for garbage, and what Keras imports for others
costs nothing until it is asked for."""

import os
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "imports"
PROGRAM = """
import gc, sys
looks = lambda: sum(generation["collections"] for generation in gc.get_stats())
before = looks()
import keras
while_imported = looks() - before
print(sorted({"matplotlib", "sklearn"} & sys.modules.keys()))
from sklearn.base import BaseEstimator
print(issubclass(keras.wrappers.SKLearnClassifier, BaseEstimator))
print(keras.visualization.plot_image_gallery.__name__)
print(gc.isenabled(), while_imported < 10, gc.get_freeze_count())
"""


def test_imports_are_fast_and_change_nothing():
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE
    )
    expected = ["[]", "True", "plot_image_gallery", "True", "True", "0"]
    assert ended.stdout.decode().split() == expected
