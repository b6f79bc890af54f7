"""How long a TFX Trainer takes until its first step: TFX's own, and on ranks.

    .venv-tfx/bin/python benchmarks/tfx_start.py

The runner has imported TFX before the clock starts, as it has for any component.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time

import tensorflow as tf
from tfx.components.trainer.executor import GenericExecutor
from tfx.types import standard_artifacts

import keras_hvd

MODULE = """
import pathlib, time
import keras, keras_hvd, numpy as np
from tfx_bsl.public import tfxio

class Clock(keras.callbacks.Callback):
    def __init__(self, path):
        super().__init__()
        self.path = pathlib.Path(path)
    def on_train_batch_begin(self, batch, logs=None):
        if keras_hvd.rank() == 0 and not self.path.exists():
            self.path.write_text(str(time.monotonic()))

def run_fn(fn_args):
    keras_hvd.init()
    x = np.ones([64, 8], np.float32)
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(1)])
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    model.fit(x, x[:, :1], verbose=0, callbacks=[
        Clock(fn_args.custom_config["clock"]),
        keras_hvd.callbacks.BroadcastGlobalVariables(0)])
    model.export(fn_args.serving_model_dir, verbose=False)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    own = [seconds(0) for _ in range(arguments.repeats)]
    print(f"TFX's Trainer, in the runner's process: {shown(own)}")
    for ranks in arguments.ranks:
        taken = [seconds(ranks) for _ in range(arguments.repeats)]
        print(f"keras_hvd.tfx.Trainer, {ranks} ranks: {shown(taken)}")


def shown(taken: list[float]) -> str:
    return f"{statistics.median(taken):.1f} s ({min(taken):.1f} to {max(taken):.1f})"


def seconds(ranks: int) -> float:
    """From the executor's start to the first step; TFX's own executor for 0 ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        module = folder / "module.py"
        module.write_text(MODULE)
        clock = folder / "clock"
        inputs = {"examples": [artifact(standard_artifacts.Examples, folder / "data")]}
        inputs["examples"][0].split_names = '["train", "eval"]'
        for split in ("train", "eval"):
            path = folder / "data" / f"Split-{split}"
            path.mkdir()
            with tf.io.TFRecordWriter(str(path / "data.gz"), "GZIP") as writer:
                writer.write(tf.train.Example().SerializeToString())
        outputs = {
            "model": [artifact(standard_artifacts.Model, folder / "model")],
            "model_run": [artifact(standard_artifacts.ModelRun, folder / "model_run")],
        }
        properties = {
            "module_file": str(module),
            "train_args": "{}",
            "eval_args": "{}",
            "custom_config": json.dumps({"clock": str(clock)}),
            "num_ranks": ranks,
        }
        executor = keras_hvd.tfx.Executor() if ranks else GenericExecutor()
        begin = time.monotonic()
        executor.Do(inputs, outputs, properties)
        return float(clock.read_text()) - begin


def artifact(kind: type, folder: pathlib.Path):
    folder.mkdir()
    made = kind()
    made.uri = str(folder)
    return made


if __name__ == "__main__":
    main()
