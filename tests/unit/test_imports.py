"""tests/imports: what Keras imports for others costs nothing until it is asked for."""

import os
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "imports"
PROGRAM = """
import sys, keras
print(sorted({"matplotlib", "sklearn"} & sys.modules.keys()))
from sklearn.base import BaseEstimator
print(issubclass(keras.wrappers.SKLearnClassifier, BaseEstimator))
print(keras.visualization.plot_image_gallery.__name__)
"""


def test_keras_has_its_parts_for_other_packages_once_they_are_used():
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE
    )
    assert ended.stdout.decode().split() == ["[]", "True", "plot_image_gallery"]
