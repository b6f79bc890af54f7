"""The interface to TensorFlow for the optimizer and the callbacks.

They reach it as `keras_hvd.backends.current.framework`.
"""

from tensorflow import executing_eagerly, init_scope
from tensorflow.io import gfile
from tensorflow.random import Generator

from keras_hvd.backends.tensorflow import (
    current_strategy,
    gpu_pinning,
    guarded_saving,
    half_applied,
    layer_variables,
    random_numbers,
)
from keras_hvd.backends.tensorflow.collectives import reductions
from keras_hvd.backends.tensorflow.collectives.allreduce import (
    allreduce,
    grouped_allreduce,
)
from keras_hvd.backends.tensorflow.collectives.graph_names import name_in_graph
from keras_hvd.backends.tensorflow.collectives.job_values import (
    require_as_traced,
    size_of,
)
from keras_hvd.backends.tensorflow.collectives.join import join
from keras_hvd.backends.tensorflow.collectives.submission import on_cpu
from keras_hvd.backends.tensorflow.global_variables import refuse_session_optimizer
from keras_hvd.backends.tensorflow.gradients import (
    equal_start,
    reduction,
    traced_updates,
)
from keras_hvd.backends.tensorflow.gradients.reduced_twice import require_not_reduced
from keras_hvd.backends.tensorflow.gradients.repeated_rows import add_up_all
from keras_hvd.backends.tensorflow.gradients.tape import is_local as is_local_source
from keras_hvd.backends.tensorflow.gradients.whole_steps import WholeStep
from keras_hvd.backends.tensorflow.moments import moments_over_ranks
from keras_hvd.backends.tensorflow.variables import (
    broadcast_variables,
    checksum,
    has_value,
    value_on_host,
)
