"""Torch's part of `init`. Torch is imported only where it must be."""

from __future__ import annotations

import importlib
import sys

from keras_hvd.backends.torch import gpu_pinning
from keras_hvd.job import later_jobs, native

_failed = ""


def note_failure() -> None:
    """Takes note of a failed job before the engine, joining another, forgets it.

    Example:

    >>> note_failure()
    """
    global _failed
    _failed = native.engine().khvd_failure().decode(errors="replace") or _failed


def failure() -> str:
    """Why a job of this process has failed; "" if none has, or `forget_failure` ran.

    >>> failure()
    ''
    """
    note_failure()
    return _failed


def forget_failure() -> None:
    """Takes the variables of a job that has failed for whole.

    >>> forget_failure()
    """
    global _failed
    _failed = ""


def prepare(rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Readies this process for its job: where tensors live, and checks of its steps.

    `rank` is the place in the job, and the other numbers are the launcher's.
    """
    del rank
    gpu_pinning.pin(local_rank, local_size)
    if "keras" in sys.modules and (size > 1 or later_jobs.are_possible()):
        # The module is far above this layer, and of no use without Keras.
        importlib.import_module("keras_hvd.optimizer.traced_steps").install()
