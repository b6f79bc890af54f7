"""What keras_hvd has on torch, without TensorFlow, and what it says of the rest."""

import subprocess
import sys

import pytest
import torch

import keras_hvd

# Each public name that is TensorFlow's alone, and what to use.
OF_TENSORFLOW = {
    "Strategy": "DistributedOptimizer with fit",
    "DistributedGradientTape": "DistributedOptimizer",
    "PartialDistributedGradientTape": "DistributedOptimizer",
    "BroadcastGlobalVariablesHook": "broadcast_variables",
    "broadcast_global_variables": "broadcast_variables",
    "alltoall": "keras_hvd.allgather",
    "grouped_reducescatter": "keras_hvd.allreduce",
    "local_rank_op": "keras_hvd.rank",
    "local_size_op": "keras_hvd.rank",
    "process_set_included_op": "keras_hvd.rank",
    "rank_op": "keras_hvd.rank",
    "reducescatter": "keras_hvd.allreduce",
    "size_op": "keras_hvd.rank",
}
# These want a library of their own, or take TensorFlow from the user.
NEED_A_LIBRARY = {"keras_tuner", "ray", "spark", "tfx"}


@pytest.mark.parametrize("name", sorted(OF_TENSORFLOW))
def test_a_name_of_tensorflow_says_what_to_use(name):
    wanted = f"keras_hvd.{name} works with Keras on TensorFlow alone.*"
    with pytest.raises(ImportError, match=wanted + OF_TENSORFLOW[name]):
        getattr(keras_hvd, name)


@pytest.mark.parametrize(
    "name", ["Position", "distribute", "even", "from_arrays", "from_files", "shard"]
)
def test_what_takes_a_dataset_of_tensorflow_says_what_to_use(name):
    wanted = f"keras_hvd.data.{name} works with .* alone.* keras_hvd.data.part"
    with pytest.raises(ImportError, match=wanted):
        getattr(keras_hvd.data, name)


@pytest.mark.parametrize(
    "name", ["KerasState", "TensorFlowKerasState", "TensorFlowState", "fit"]
)
def test_a_state_of_tensorflow_says_what_to_use(name):
    wanted = f"keras_hvd.elastic.{name} works with .* alone.* BackupAndRestore"
    with pytest.raises(ImportError, match=wanted):
        getattr(keras_hvd.elastic, name)
    assert keras_hvd.elastic.ObjectState(epoch=0).epoch == 0


def test_the_check_of_the_installation_wants_no_tensorflow():
    checked = subprocess.run(
        [sys.executable, "-m", "keras_hvd.launch", "--check-build"],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout
    assert f"torch {torch.__version__}" in checked.stdout
    assert "TensorFlow" not in checked.stdout


PROGRAM = """
import sys

# An import of it raises ModuleNotFoundError.
sys.modules["tensorflow"] = None
import keras_hvd

for name in keras_hvd.__all__:
    if name not in {without}:
        getattr(keras_hvd, name)
for name in keras_hvd.callbacks.__all__:
    getattr(keras_hvd.callbacks, name)
keras_hvd.data.part, keras_hvd.data.ShardedPyDataset
keras_hvd.init()
import keras

keras_hvd.DistributedOptimizer(keras.optimizers.SGD())
keras_hvd.callbacks.BroadcastGlobalVariables(0)
print([name for name in sys.modules if name.startswith("tensorflow.")])
"""


def test_every_other_name_is_there_without_tensorflow():
    program = PROGRAM.format(without={*OF_TENSORFLOW, *NEED_A_LIBRARY})
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert ended.stdout == "[]\n", ended.stderr
