"""Jobs that lose a rank, or whose ranks begin with different weights or backends."""

import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[2]
ON_STAND_IN_GPU = f"""
import sys

sys.path.insert(0, {str(TESTS)!r})
import stand_in_gpu

stand_in_gpu.choose()
stand_in_gpu.use()
"""

TRAINING = """
import os, signal, sys, time
import keras, numpy as np
import keras_hvd

keras_hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")

class Dies(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3 and keras_hvd.rank() == 1:
            print("died at", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

try:
    model.fit(np.ones((32, 4)), np.ones(32), batch_size=4, verbose=0, callbacks=[
        keras_hvd.callbacks.BroadcastGlobalVariables(0), Dies()])
except keras_hvd.RankFailedError as error:
    print("heard at", time.time(), error, flush=True)
try:
    model.save(sys.argv[1])
except keras_hvd.RankFailedError as error:
    print("not saved:", error, flush=True)
"""


def run(program: str, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess:
    launch = [sys.executable, "-m", "keras_hvd.launch", "-np", str(ranks)]
    return subprocess.run(
        [*launch, sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("device", ["", ON_STAND_IN_GPU], ids=["cpu", "gpu"])
def test_the_others_learn_of_a_killed_rank_and_save_nothing(tmp_path, device):
    path = tmp_path / "model.keras"
    ended = run(device + TRAINING, str(path))
    lines = dict(
        line.removeprefix("[0] ").removeprefix("[1] ").split(" at ", 1)
        for line in ended.stdout.splitlines()
        if " at " in line
    )
    heard, text = lines["heard"].split(" ", 1)
    assert float(heard) - float(lines["died"]) < 2  # seconds
    assert "rank 1 (pid " in text and "was killed by SIGKILL" in text
    assert "not saved: nothing is saved any more" in ended.stdout
    assert not path.exists()


STARTS = """
import sys
import keras, numpy as np
import keras_hvd

keras_hvd.init()
keras.utils.set_random_seed(keras_hvd.rank() if sys.argv[1] == "different" else 1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
model.fit(np.ones((32, 4)), np.ones(32), verbose=0)
"""


@pytest.mark.parametrize("start", ["different", "equal"])
def test_different_weights_at_the_start_are_told_once(start):
    ended = run(STARTS, start)
    assert ended.returncode == 0, ended.stderr
    told = ended.stderr.count("begun to train with different weights")
    assert told == (start == "different")


# Rank 1 alone runs Keras on TensorFlow.
MIXED = """
import os, sys

on_tensorflow, program, case = sys.argv[1:]
if os.environ["KERAS_HVD_RANK"] == "1":
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.execv(on_tensorflow, [on_tensorflow, "-c", program, case])
os.execv(sys.executable, [sys.executable, "-c", program, case])
"""

TRAINING_ON_ANY = """
import sys
import keras, numpy as np
import keras_hvd

keras_hvd.init()
case, optimizer = sys.argv[1], keras.optimizers.SGD()
if case == "loss scaling":
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
if case == "broadcast":
    keras_hvd.broadcast_variables(model.variables, root_rank=0)
model.compile(keras_hvd.DistributedOptimizer(optimizer), "mse")
model.fit(np.ones((32, 4)), np.ones(32), verbose=0)
print("trained")
"""


@pytest.mark.parametrize("case", ["", "loss scaling", "broadcast"])
def test_ranks_on_different_backends(case):
    on_tensorflow = pathlib.Path(__file__).parents[3] / ".venv/bin/python"
    if not on_tensorflow.exists():
        pytest.skip("needs an environment with TensorFlow: make install")
    ended = run(MIXED, str(on_tensorflow), TRAINING_ON_ANY, case)
    assert ended.returncode != 0 and "trained" not in ended.stdout
    remedy = "set the environment variable KERAS_BACKEND to the same on all ranks"
    for rank, backend in enumerate(["torch", "tensorflow"]):
        told = f"Keras runs on {backend} on rank {rank}, and on another backend on"
        assert any(told in x and remedy in x for x in ended.stderr.splitlines()), rank
