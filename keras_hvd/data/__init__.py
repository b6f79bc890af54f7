"""Data for several ranks: each gets its part, exactly, evenly and reproducibly.

Names that take a `tf.data.Dataset`, or make one, are there with Keras on TensorFlow.
"""

from typing import TYPE_CHECKING, Any

from keras_hvd.backends import current
from keras_hvd.data.part import part
from keras_hvd.data.sharded_py_dataset import ShardedPyDataset

if TYPE_CHECKING or current.framework_name() == "tensorflow":
    from keras_hvd.data.distribute import distribute
    from keras_hvd.data.even import even
    from keras_hvd.data.from_arrays import from_arrays
    from keras_hvd.data.from_files import from_files
    from keras_hvd.data.position import Position
    from keras_hvd.data.shard import shard

__all__ = [
    "Position",
    "ShardedPyDataset",
    "distribute",
    "even",
    "from_arrays",
    "from_files",
    "part",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise current.of_tensorflow_alone(
        f"data.{name}",
        "keras_hvd.data.part for arrays, keras_hvd.data.ShardedPyDataset, or a "
        "torch.utils.data.DataLoader that gives each rank its own part, such as with a "
        "torch.utils.data.DistributedSampler(data, keras_hvd.size(), keras_hvd.rank())",
    )
