"""The interface to torch for the optimizer and the callbacks.

They reach it as `keras_hvd.backends.current.framework`.
"""

from keras_hvd.backends.torch import (
    current_strategy,
    gfile,
    gpu_pinning,
    guarded_saving,
    layer_variables,
    random_numbers,
)
from keras_hvd.backends.torch.collectives import reductions
from keras_hvd.backends.torch.collectives.allreduce import allreduce, grouped_allreduce
from keras_hvd.backends.torch.collectives.join import join
from keras_hvd.backends.torch.eager import (
    WholeStep,
    add_up_all,
    executing_eagerly,
    init_scope,
    is_local_source,
    name_in_graph,
    on_cpu,
    require_as_traced,
    size_of,
)
from keras_hvd.backends.torch.gradients import equal_start, reduction, traced_updates
from keras_hvd.backends.torch.moments import moments_over_ranks
from keras_hvd.backends.torch.optimizers import (
    refuse_session_optimizer,
    require_not_reduced,
)
from keras_hvd.backends.torch.variables import (
    broadcast_variables,
    checksum,
    has_value,
)

# There is no such class: nothing is an instance of one.
Generator: tuple[type, ...] = ()
