"""Barrier: no rank passes it before all ranks have reached it."""

from __future__ import annotations

import torch

from keras_hvd.backends.torch.collectives.calls import call
from keras_hvd.job.process_sets import ProcessSet, global_process_set


# Dynamo would trace the engine's calls.
@torch.compiler.disable
def barrier(
    process_set: ProcessSet = global_process_set, name: str | None = None
) -> None:
    """Waits until every rank of the process set has called it.

    Args:
        process_set: the ranks that take part; by default all of them.
        name: matches the barrier between ranks.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        ValueError: the process set is not part of the job.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.barrier()
    """
    with call("barrier", name, process_set) as (collectives, known, number):
        collectives.barrier(known, number)
