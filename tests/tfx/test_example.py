"""The example runs from anywhere, and tells the wines apart."""

import json
import os
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "tfx"

JUDGE = """
import json, sys
import tensorflow as tf
from wine_features import FEATURES, LABEL, load
table = load()
serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
columns = {name: tf.constant(table[name][:, None], tf.float32) for name in FEATURES}
(odds,) = serve(**columns).values()
print(json.dumps(float((odds.numpy().argmax(1) == table[LABEL]).mean())))
"""


def test_the_example_trains_and_pushes_a_good_model(tmp_path):
    program = str(EXAMPLES / "wine_pipeline.py")
    subprocess.run(
        [sys.executable, program, "--ranks", "2", "--root", "run"],
        cwd=tmp_path,
        check=True,
    )
    (pushed,) = (tmp_path / "run" / "serving").iterdir()
    judged = subprocess.run(
        [sys.executable, "-c", JUDGE, str(pushed)],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert json.loads(judged.stdout) > 0.95
