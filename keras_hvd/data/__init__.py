"""Data for several ranks: each gets its part, exactly, evenly and reproducibly."""

from keras_hvd.data.distribute import distribute
from keras_hvd.data.even import even
from keras_hvd.data.from_files import from_files
from keras_hvd.data.part import part
from keras_hvd.data.position import Position
from keras_hvd.data.shard import shard
from keras_hvd.data.sharded_py_dataset import ShardedPyDataset

__all__ = [
    "Position",
    "ShardedPyDataset",
    "distribute",
    "even",
    "from_files",
    "part",
    "shard",
]
