"""Elastic training: it goes on when ranks of the job die.

TensorFlow and Keras are imported when a name that needs them is first used.
"""

from typing import TYPE_CHECKING

from keras_hvd.lazy_names import importer

if TYPE_CHECKING:
    from keras_hvd.elastic.callbacks import CommitStateCallback as CommitStateCallback
    from keras_hvd.elastic.callbacks import (
        UpdateBatchStateCallback as UpdateBatchStateCallback,
    )
    from keras_hvd.elastic.callbacks import (
        UpdateEpochStateCallback as UpdateEpochStateCallback,
    )
    from keras_hvd.elastic.keras_fit import fit as fit
    from keras_hvd.elastic.loop import run as run
    from keras_hvd.elastic.state import ObjectState as ObjectState
    from keras_hvd.elastic.state import State as State
    from keras_hvd.elastic.tensorflow_state import KerasState as KerasState
    from keras_hvd.elastic.tensorflow_state import (
        TensorFlowKerasState as TensorFlowKerasState,
    )
    from keras_hvd.elastic.tensorflow_state import TensorFlowState as TensorFlowState

_DEFINED_IN = {
    "CommitStateCallback": "callbacks",
    "KerasState": "tensorflow_state",
    "ObjectState": "state",
    "State": "state",
    "TensorFlowKerasState": "tensorflow_state",
    "TensorFlowState": "tensorflow_state",
    "UpdateBatchStateCallback": "callbacks",
    "UpdateEpochStateCallback": "callbacks",
    "fit": "keras_fit",
    "run": "loop",
}

__all__ = sorted(_DEFINED_IN)

__getattr__, __dir__ = importer(__name__, _DEFINED_IN)
