"""Callbacks for `model.fit` on several ranks.

The names with `Callback` are Horovod's.
"""

from keras_hvd.callbacks.backup_and_restore import BackupAndRestore
from keras_hvd.callbacks.best_model_checkpoint import BestModelCheckpoint
from keras_hvd.callbacks.broadcast_global_variables import BroadcastGlobalVariables
from keras_hvd.callbacks.learning_rate_schedule import LearningRateSchedule
from keras_hvd.callbacks.learning_rate_warmup import LearningRateWarmup
from keras_hvd.callbacks.metric_average import MetricAverage

BroadcastGlobalVariablesCallback = BroadcastGlobalVariables
LearningRateScheduleCallback = LearningRateSchedule
LearningRateWarmupCallback = LearningRateWarmup
MetricAverageCallback = MetricAverage

__all__ = [
    "BackupAndRestore",
    "BestModelCheckpoint",
    "BroadcastGlobalVariables",
    "BroadcastGlobalVariablesCallback",
    "LearningRateSchedule",
    "LearningRateScheduleCallback",
    "LearningRateWarmup",
    "LearningRateWarmupCallback",
    "MetricAverage",
    "MetricAverageCallback",
]
