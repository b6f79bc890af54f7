"""TensorFlow's part of `init`. TensorFlow is imported only where it must be."""

from __future__ import annotations

import importlib
import sys

from keras_hvd.backends.tensorflow import allocator, gpu_pinning
from keras_hvd.job import later_jobs


def note_failure() -> None:
    """Takes note of a failed job before the engine, joining another, forgets it.

    Example:

    >>> note_failure()
    """
    # No variable of a process that has not imported it can be half applied.
    if "tensorflow" in sys.modules:
        from keras_hvd.backends.tensorflow import half_applied

        half_applied.note_failure()


def prepare(rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Readies this process for its job: where tensors live, and checks of its steps.

    `rank` is the place in the job, and the other numbers are the launcher's.
    """
    allocator.use(rank)
    # By the launcher's local rank, which no other part of its job has.
    gpu_pinning.pin(local_rank, local_size)
    keras = sys.modules.get("keras")
    may_be_several = size > 1 or later_jobs.are_possible()
    if may_be_several and keras is not None and keras.backend.backend() == "tensorflow":
        watch_steps()


def watch_steps() -> None:
    """Makes Keras check that the steps of all models reduce their gradients."""
    # The module is far above this layer, and of no use without Keras.
    importlib.import_module("keras_hvd.optimizer.traced_steps").install()
