"""Data for several ranks: each reads its part, and all make as many steps."""

from keras_hvd.data.distribute import distribute
from keras_hvd.data.even import even
from keras_hvd.data.shard import shard
from keras_hvd.data.sharded_py_dataset import ShardedPyDataset

__all__ = ["ShardedPyDataset", "distribute", "even", "shard"]
