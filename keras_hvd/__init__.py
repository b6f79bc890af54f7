"""Data-parallel training for Keras 3, from one script to many processes.

Every public name is defined in one module and listed here twice: in `_NAMES`, and under
`TYPE_CHECKING` for type checkers (a test keeps the two alike). A module is imported
when one of its names is first used (PEP 562), so that `khvdrun`, which executes this
file too, starts without a framework. What depends on the framework is listed by its
module for TensorFlow; another framework has it in a module of that name.
"""

from typing import TYPE_CHECKING, Any

from keras_hvd.version import __version__ as __version__

if TYPE_CHECKING:
    from keras_hvd import callbacks as callbacks
    from keras_hvd import data as data
    from keras_hvd import elastic as elastic
    from keras_hvd import environment as environment
    from keras_hvd import exceptions as exceptions
    from keras_hvd import keras_tuner as keras_tuner
    from keras_hvd import ray as ray
    from keras_hvd import spark as spark
    from keras_hvd import tfx as tfx
    from keras_hvd.backends.reduce_op import Adasum as Adasum
    from keras_hvd.backends.reduce_op import Average as Average
    from keras_hvd.backends.reduce_op import Max as Max
    from keras_hvd.backends.reduce_op import Min as Min
    from keras_hvd.backends.reduce_op import Product as Product
    from keras_hvd.backends.reduce_op import ReduceOp as ReduceOp
    from keras_hvd.backends.reduce_op import Sum as Sum
    from keras_hvd.backends.sync_batch_normalization import (
        SyncBatchNormalization as SyncBatchNormalization,
    )
    from keras_hvd.backends.tensorflow.collectives.allgather import (
        allgather as allgather,
    )
    from keras_hvd.backends.tensorflow.collectives.allgather import (
        grouped_allgather as grouped_allgather,
    )
    from keras_hvd.backends.tensorflow.collectives.allreduce import (
        allreduce as allreduce,
    )
    from keras_hvd.backends.tensorflow.collectives.allreduce import (
        grouped_allreduce as grouped_allreduce,
    )
    from keras_hvd.backends.tensorflow.collectives.alltoall import alltoall as alltoall
    from keras_hvd.backends.tensorflow.collectives.barrier import barrier as barrier
    from keras_hvd.backends.tensorflow.collectives.broadcast import (
        broadcast as broadcast,
    )
    from keras_hvd.backends.tensorflow.collectives.join import join as join
    from keras_hvd.backends.tensorflow.collectives.reducescatter import (
        grouped_reducescatter as grouped_reducescatter,
    )
    from keras_hvd.backends.tensorflow.collectives.reducescatter import (
        reducescatter as reducescatter,
    )
    from keras_hvd.backends.tensorflow.compression import Compression as Compression
    from keras_hvd.backends.tensorflow.global_variables import (
        BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook,
    )
    from keras_hvd.backends.tensorflow.global_variables import (
        broadcast_global_variables as broadcast_global_variables,
    )
    from keras_hvd.backends.tensorflow.gradients.tape import (
        DistributedGradientTape as DistributedGradientTape,
    )
    from keras_hvd.backends.tensorflow.gradients.tape import (
        PartialDistributedGradientTape as PartialDistributedGradientTape,
    )
    from keras_hvd.backends.tensorflow.guarded_saving import (
        allow_saving as allow_saving,
    )
    from keras_hvd.backends.tensorflow.rank_ops import local_rank_op as local_rank_op
    from keras_hvd.backends.tensorflow.rank_ops import local_size_op as local_size_op
    from keras_hvd.backends.tensorflow.rank_ops import (
        process_set_included_op as process_set_included_op,
    )
    from keras_hvd.backends.tensorflow.rank_ops import rank_op as rank_op
    from keras_hvd.backends.tensorflow.rank_ops import size_op as size_op
    from keras_hvd.backends.tensorflow.variables import broadcast_ as broadcast_
    from keras_hvd.backends.tensorflow.variables import (
        broadcast_variables as broadcast_variables,
    )
    from keras_hvd.callbacks.evaluation import evaluate as evaluate
    from keras_hvd.callbacks.schedules import warmup_schedule as warmup_schedule
    from keras_hvd.exceptions import ForkedError as ForkedError
    from keras_hvd.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt
    from keras_hvd.exceptions import KerasHvdError as KerasHvdError
    from keras_hvd.exceptions import LibraryError as LibraryError
    from keras_hvd.exceptions import MismatchError as MismatchError
    from keras_hvd.exceptions import NotInitializedError as NotInitializedError
    from keras_hvd.exceptions import RankFailedError as RankFailedError
    from keras_hvd.exceptions import ShutDownError as ShutDownError
    from keras_hvd.job.arrival import local_rank as local_rank
    from keras_hvd.job.arrival import rank as rank
    from keras_hvd.job.arrival import size as size
    from keras_hvd.job.basics import cross_rank as cross_rank
    from keras_hvd.job.basics import cross_size as cross_size
    from keras_hvd.job.basics import is_initialized as is_initialized
    from keras_hvd.job.basics import local_size as local_size
    from keras_hvd.job.basics import shutdown as shutdown
    from keras_hvd.job.capabilities import ccl_built as ccl_built
    from keras_hvd.job.capabilities import cuda_built as cuda_built
    from keras_hvd.job.capabilities import ddl_built as ddl_built
    from keras_hvd.job.capabilities import gloo_built as gloo_built
    from keras_hvd.job.capabilities import gloo_enabled as gloo_enabled
    from keras_hvd.job.capabilities import is_homogeneous as is_homogeneous
    from keras_hvd.job.capabilities import mpi_built as mpi_built
    from keras_hvd.job.capabilities import mpi_enabled as mpi_enabled
    from keras_hvd.job.capabilities import (
        mpi_threads_supported as mpi_threads_supported,
    )
    from keras_hvd.job.capabilities import nccl_built as nccl_built
    from keras_hvd.job.capabilities import rocm_built as rocm_built
    from keras_hvd.job.objects import allgather_object as allgather_object
    from keras_hvd.job.objects import broadcast_object as broadcast_object
    from keras_hvd.job.objects import broadcast_object_fn as broadcast_object_fn
    from keras_hvd.job.process_sets import ProcessSet as ProcessSet
    from keras_hvd.job.process_sets import add_process_set as add_process_set
    from keras_hvd.job.process_sets import global_process_set as global_process_set
    from keras_hvd.job.process_sets import remove_process_set as remove_process_set
    from keras_hvd.launch.function import run as run
    from keras_hvd.optimizer.distributed_optimizer import (
        DistributedOptimizer as DistributedOptimizer,
    )
    from keras_hvd.optimizer.distributed_optimizer import (
        PartialDistributedOptimizer as PartialDistributedOptimizer,
    )
    from keras_hvd.optimizer.loading import load_model as load_model
    from keras_hvd.strategy.strategy import Strategy as Strategy
    from keras_hvd.timeline import start_timeline as start_timeline
    from keras_hvd.timeline import stop_timeline as stop_timeline
    from keras_hvd.world.initialization import init as init

_SUBMODULES = (
    *("callbacks", "data", "elastic", "environment", "exceptions"),
    *("keras_tuner", "ray", "spark", "tfx"),
)
# By the module under keras_hvd that defines them.
_NAMES = {
    "backends.reduce_op": "Adasum Average Max Min Product ReduceOp Sum",
    "backends.sync_batch_normalization": "SyncBatchNormalization",
    "backends.tensorflow.collectives.allgather": "allgather grouped_allgather",
    "backends.tensorflow.collectives.allreduce": "allreduce grouped_allreduce",
    "backends.tensorflow.collectives.alltoall": "alltoall",
    "backends.tensorflow.collectives.barrier": "barrier",
    "backends.tensorflow.collectives.broadcast": "broadcast",
    "backends.tensorflow.collectives.join": "join",
    "backends.tensorflow.collectives.reducescatter": (
        "grouped_reducescatter reducescatter"
    ),
    "backends.tensorflow.compression": "Compression",
    "backends.tensorflow.global_variables": (
        "broadcast_global_variables BroadcastGlobalVariablesHook"
    ),
    "backends.tensorflow.gradients.tape": (
        "DistributedGradientTape PartialDistributedGradientTape"
    ),
    "backends.tensorflow.guarded_saving": "allow_saving",
    "backends.tensorflow.rank_ops": (
        "local_rank_op local_size_op process_set_included_op rank_op size_op"
    ),
    "backends.tensorflow.variables": "broadcast_ broadcast_variables",
    "callbacks.evaluation": "evaluate",
    "callbacks.schedules": "warmup_schedule",
    "exceptions": (
        "ForkedError HostsUpdatedInterrupt KerasHvdError LibraryError MismatchError "
        "NotInitializedError RankFailedError ShutDownError"
    ),
    "job.arrival": "local_rank rank size",
    "job.basics": "cross_rank cross_size is_initialized local_size shutdown",
    "job.capabilities": (
        "ccl_built cuda_built ddl_built gloo_built gloo_enabled is_homogeneous "
        "mpi_built mpi_enabled mpi_threads_supported nccl_built rocm_built"
    ),
    "job.objects": "allgather_object broadcast_object broadcast_object_fn",
    "job.process_sets": (
        "add_process_set global_process_set ProcessSet remove_process_set"
    ),
    "launch.function": "run",
    "optimizer.distributed_optimizer": (
        "DistributedOptimizer PartialDistributedOptimizer"
    ),
    "optimizer.loading": "load_model",
    "strategy.strategy": "Strategy",
    "timeline": "start_timeline stop_timeline",
    "world.initialization": "init",
}
_DEFINED_IN = {name: each for each, names in _NAMES.items() for name in names.split()}

__all__ = [*_SUBMODULES, *_DEFINED_IN]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    is_module = name in _SUBMODULES
    defined_in = f"{__name__}.{name if is_module else _DEFINED_IN[name]}"
    # Not at the top: `import keras_hvd` imports no more than it needs.
    from keras_hvd.backends import current

    module = current.module_of(name, defined_in)
    value = module if is_module else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
