"""Chooses the allocator of TensorFlow's tensors in host memory.

By default TensorFlow takes each tensor from the C library and gives it back, except on
processors where it uses oneDNN. The C library gives large ones back to the system, so
the next tensor of that size costs a page fault for every 4 KiB, which takes longer than
its allreduce. TensorFlow's own pool keeps freed memory for later tensors. Environment
variables choose it, when TensorFlow creates its devices. Nothing here imports
TensorFlow, because `khvdrun` uses this too.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Mapping

from keras_hvd.job import gpu_libraries, log, settings

_USE_POOL = "TF_CPU_ALLOCATOR_USE_BFC"
_LIMIT = "TF_CPU_BFC_MEM_LIMIT_IN_MB"
# TensorFlow's default limit.
_DEFAULT_LIMIT_MIB = 64 << 10

# Users who set one of these have chosen an allocator.
_CHOICES = (_USE_POOL, "TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "GLIBC_TUNABLES", "LD_PRELOAD")


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to set so that TensorFlow uses its pool; {} to change nothing.

    Example:

    >>> variables({})["TF_CPU_ALLOCATOR_USE_BFC"]
    'true'
    >>> variables({"MALLOC_ARENA_MAX": "1"})
    {}
    >>> variables({"KERAS_HVD_ALLOCATOR": "unchanged"})
    {}
    """
    chosen = settings.allocator(environment)
    if chosen == "unchanged" or (not chosen and chosen_by(environment)):
        return {}
    found = {_USE_POOL: "true"}
    # With oneDNN, TensorFlow's limit is the machine's memory too.
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE >> 20
    if memory > _DEFAULT_LIMIT_MIB and not environment.get(_LIMIT):
        found[_LIMIT] = str(memory)
    return found


def uses_pool(environment: Mapping[str, str]) -> bool:
    """Whether khvdrun's ranks will take tensors from TensorFlow's pool.

    False also if TensorFlow would use its pool by itself.

    Example:

    >>> uses_pool({}), uses_pool({"TF_CPU_ALLOCATOR_USE_BFC": "0"})
    (True, False)
    """
    said = {**environment, **variables(environment)}.get(_USE_POOL, "")
    return said.lower() in ("1", "true")


def chosen_by(environment: Mapping[str, str]) -> str:
    """The variable with which the user has chosen an allocator; "" for none.

    Example:

    >>> chosen_by({"LD_PRELOAD": "/usr/lib/libtcmalloc.so.4"})
    'LD_PRELOAD'
    >>> chosen_by({"LD_PRELOAD": "/usr/lib/libfaketime.so.1"})
    ''
    """
    for name, value in environment.items():
        if not value:
            continue
        if name.startswith("MALLOC_"):
            return name
        # The last two have other uses too.
        if name in _CHOICES and (name.startswith("TF_") or "alloc" in value):
            return name
    return ""


def use(rank: int) -> None:
    """Makes TensorFlow use its pool in this process, unless it has devices already.

    Rank 0 warns if it is too late.
    """
    wanted = variables(os.environ)
    if wanted and _has_devices():
        if rank == 0 and not (_has_pool() or gpu_libraries.driver_is_loaded()):
            log.write("warning", TOO_LATE)
        return
    os.environ.update(wanted)


TOO_LATE = (
    "TensorFlow was in use before keras_hvd.init(), so large tensors cost page "
    f"faults: call keras_hvd.init() first, or set {_USE_POOL}=true (khvdrun does; "
    "KERAS_HVD_ALLOCATOR=unchanged keeps it as it is)"
)
"""Rank 0's warning if TensorFlow has chosen its allocator before `init`."""


def _has_devices() -> bool:
    if "tensorflow" not in sys.modules:
        return False
    from tensorflow.python.eager import context

    return context.context()._initialized


def _has_pool() -> bool:
    """Whether TensorFlow's allocator reports its memory, as pools do."""
    import tensorflow as tf

    try:
        tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:
        return False
    return True
