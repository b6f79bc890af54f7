"""tests/imports: imports collect no garbage, nor do collections walk through them, and
Keras' imports for others cost nothing until they are asked for."""

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
print(sorted({"matplotlib", "pandas", "sklearn"} & sys.modules.keys()))
import pandas
print(pandas.DataFrame.__name__)
from sklearn.base import BaseEstimator
print(issubclass(keras.wrappers.SKLearnClassifier, BaseEstimator))
print(keras.visualization.plot_image_gallery.__name__)
print(gc.isenabled(), while_imported < 10, gc.get_freeze_count() > 300_000)
"""


def test_imports_are_fast_and_change_nothing():
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE
    )
    expected = ["[]", "DataFrame", "True", "plot_image_gallery", "True", "True", "True"]
    assert ended.stdout.decode().split() == expected


BEFORE = """
import gc
import pandas
gc.disable()
import keras
from keras.src.trainers.data_adapters import array_slicing
print(array_slicing.pandas is pandas, gc.isenabled())
"""


def test_what_was_imported_or_set_before_counts():
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    ended = subprocess.run(
        [sys.executable, "-c", BEFORE], env=environment, stdout=subprocess.PIPE
    )
    assert ended.stdout.decode().split() == ["True", "False"]
