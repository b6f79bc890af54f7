"""TFX: a Trainer and a Tuner that train on several ranks.

TFX is imported when one of these names is first used.
"""

from typing import TYPE_CHECKING

from keras_hvd.lazy_names import importer

if TYPE_CHECKING:
    from keras_hvd.tfx.component import Trainer as Trainer
    from keras_hvd.tfx.component import Tuner as Tuner
    from keras_hvd.tfx.dataset import tf_dataset as tf_dataset
    from keras_hvd.tfx.executor import Executor as Executor

_DEFINED_IN = {
    "Executor": "executor",
    "Trainer": "component",
    "Tuner": "component",
    "tf_dataset": "dataset",
}

__all__ = sorted(_DEFINED_IN)


__getattr__, __dir__ = importer(
    __name__, _DEFINED_IN, ["tfx", "tfx_bsl"], lambda: "docs/tfx.md has what to install"
)
